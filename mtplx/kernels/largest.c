/* The largest numbers of each row: what top-k leaves of a vocabulary. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64, ROWS_OF_ONE_THREAD = 8 };

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

/* Most blocks of a row hold nothing that is large enough, and are passed over. */
static int has(const float *x, int32_t count, float least) {
    if (count < BLOCK) return 1;
    Ints found = {0};
    for (int i = 0; i < BLOCK; i += 4) {
        Floats four;
        memcpy(&four, x + i, sizeof four);
        found |= four >= least;
    }
    int64_t half[2];
    memcpy(half, &found, sizeof half);
    return (half[0] | half[1]) != 0;
}

/* Puts a number in the place of the least, which a heap has at its top. */
static void replace_least(float *heap, int32_t count, float x) {
    int32_t at = 0;
    for (int32_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= x) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = x;
}

static int32_t block_at(int32_t begin, int32_t width) {
    return width - begin < BLOCK ? width - begin : BLOCK;
}

/* `heap` has room for `count` numbers. */
static float kth_largest(const float *x, int32_t width, float *heap, int32_t count) {
    for (int32_t i = 0; i < count; i++) heap[i] = -INFINITY;
    for (int32_t begin = 0; begin < width; begin += BLOCK) {
        const int32_t end = begin + block_at(begin, width);
        if (!has(x + begin, end - begin, heap[0])) continue;
        for (int32_t i = begin; i < end; i++)
            if (x[i] > heap[0]) replace_least(heap, count, x[i]);
    }
    return heap[0];
}

static int32_t largest_of_row(const float *x, int32_t width, int64_t wanted, float *values,
                              int64_t *columns, int32_t room) {
    const int32_t most = room < width ? room : width;
    const int32_t count = wanted < 1 ? 1 : wanted < most ? (int32_t)wanted : most;
    const float least = kth_largest(x, width, values, count);
    int32_t found = 0;
    for (int32_t begin = 0; begin < width; begin += BLOCK) {
        const int32_t end = begin + block_at(begin, width);
        if (!has(x + begin, end - begin, least)) continue;
        for (int32_t i = begin; i < end; i++) {
            if (!(x[i] >= least && x[i] > -INFINITY)) continue;
            if (found < room) {
                values[found] = x[i];
                columns[found] = i;
            }
            found++;
        }
    }
    for (int32_t i = found; i < room; i++) {
        values[i] = -INFINITY;
        columns[i] = width;
    }
    return found;
}

/* Of each row of x [rows, width] the numbers that no `wanted` others are above: as many, and all
 * that tie with the last of them, but none that is -inf or NaN. They come with their columns, those
 * ascending, into rows of `room` each; what is left of a row is -inf at the column `width`.
 * Returns how many the row with most has; above `room`, the others of that row are missing.
 * At least one is wanted of a row, and `room` is no less than any row wants of its width. */
int32_t mtplx_largest(const float *x, const int64_t *wanted, float *values, int64_t *columns,
                      int32_t rows, int32_t width, int32_t room, int32_t threads) {
    int32_t widest = 0;
#pragma omp parallel for num_threads(threads) if (rows > ROWS_OF_ONE_THREAD) reduction(max : widest)
    for (int32_t row = 0; row < rows; row++) {
        const size_t at = (size_t)row * (size_t)room;
        const int32_t found = largest_of_row(x + (size_t)row * (size_t)width, width, wanted[row],
                                             values + at, columns + at, room);
        widest = found > widest ? found : widest;
    }
    return widest;
}
