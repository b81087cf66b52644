/* The largest numbers of each row, which are what top-k leaves of a vocabulary, and the distribution
 * that a sampler's other filters make of them. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64, ROWS_OF_ONE_THREAD = 8 };

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

/* Most blocks of a row hold nothing that is large enough, and are passed over; not those with NaN. */
static int has(const float *x, int32_t count, float least) {
    if (count < BLOCK) return 1;
    Ints found = {0};
    for (int i = 0; i < BLOCK; i += 4) {
        Floats four;
        memcpy(&four, x + i, sizeof four);
        found |= ~(four < least);
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

/* `heap` has room for `count` numbers; where there is NaN, it is the answer. */
static float kth_largest(const float *x, int32_t width, float *heap, int32_t count) {
    float nothing = 0;
    for (int32_t i = 0; i < count; i++) heap[i] = -INFINITY;
    for (int32_t begin = 0; begin < width; begin += BLOCK) {
        const int32_t end = begin + block_at(begin, width);
        if (!has(x + begin, end - begin, heap[0])) continue;
        for (int32_t i = begin; i < end; i++) {
            if (x[i] > heap[0]) replace_least(heap, count, x[i]);
            if (isnan(x[i])) nothing = x[i];
        }
    }
    return isnan(nothing) ? nothing : heap[0];
}

static int32_t largest_of_row(const float *x, int32_t width, int64_t wanted, float *values,
                              int64_t *columns, int32_t room, float *kth) {
    const int32_t most = room < width ? room : width;
    const int32_t count = wanted < 1 ? 1 : wanted < most ? (int32_t)wanted : most;
    const float least = *kth = kth_largest(x, width, values, count);
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
        float kth;
        const int32_t found = largest_of_row(x + (size_t)row * (size_t)width, width, wanted[row],
                                             values + at, columns + at, room, &kth);
        widest = found > widest ? found : widest;
    }
    return widest;
}

typedef struct {
    float score;
    int32_t column;
} Entry;

static int by_score(const void *a, const void *b) {
    const Entry *one = a, *two = b;
    if (one->score != two->score) return one->score < two->score ? -1 : 1;
    return one->column - two->column;
}

/* Takes from the least up what fits into the surplus; what is taken becomes -inf. The one that
 * comes last stays. */
static void remove_surplus(float *scores, int32_t count, float top, float temperature,
                           double surplus, Entry *order) {
    double total = 0, mass = 0;
    for (int32_t i = 0; i < count; i++) {
        order[i] = (Entry){scores[i], i};
        total += exp((double)((scores[i] - top) / temperature));
    }
    qsort(order, (size_t)count, sizeof *order, by_score);
    for (int32_t i = 0; i + 1 < count; i++) {
        mass += exp((double)((order[i].score - top) / temperature)) / total;
        if (mass > surplus) break;
        scores[order[i].column] = -INFINITY;
    }
}

/* Scores into probabilities, in place. */
static void distribute(float *scores, int32_t count, float top, float temperature, double min_p) {
    double total = 0;
    for (int32_t i = 0; i < count; i++) total += exp((double)((scores[i] - top) / temperature));
    double left = 1;
    if (min_p > 0) {
        /* The largest has probability 1 / total. */
        left = 0;
        for (int32_t i = 0; i < count; i++) {
            const double p = exp((double)((scores[i] - top) / temperature)) / total;
            if (p >= min_p * (1 / total))
                left += p;
            else
                scores[i] = -INFINITY;
        }
    }
    for (int32_t i = 0; i < count; i++)
        scores[i] = (float)(exp((double)((scores[i] - top) / temperature)) / total / left);
}

/* What a sampler makes of the scores x [rows, width]: of each row the `wanted` largest and all that
 * tie with the last, less what top-p takes away from below (`surplus`, 1 - top-p; none below 0),
 * less what is less likely than `min_p` times the likeliest. Where none is wanted, the first of the
 * largest is all there is.
 *
 * Probabilities and their columns, those ascending, come in rows of `room`; what is left of a row is
 * 0 at the column `width`. `top` is each row's largest score; where that is not finite, the rest
 * means nothing. Returns as `mtplx_largest`, or -1 where there is no memory. */
int32_t mtplx_shape(const float *x, const int64_t *wanted, const float *temperature,
                    const double *surplus, const double *min_p, float *top, float *p,
                    int64_t *columns, int32_t rows, int32_t width, int32_t room, int32_t threads) {
    int32_t widest = 0, failed = 0;
#pragma omp parallel for num_threads(threads) if (rows > ROWS_OF_ONE_THREAD) \
    reduction(max : widest, failed)
    for (int32_t row = 0; row < rows; row++) {
        float *own = p + (size_t)row * (size_t)room;
        int64_t *at = columns + (size_t)row * (size_t)room;
        float kth;
        int32_t found = largest_of_row(x + (size_t)row * (size_t)width, width, wanted[row], own, at,
                                       room, &kth);
        const int32_t some = found < room ? found : room;
        top[row] = isnan(kth) ? kth : -INFINITY;
        for (int32_t i = 0; i < some; i++) top[row] = own[i] > top[row] ? own[i] : top[row];
        if (wanted[row] < 1) {
            for (int32_t i = 0; i < room; i++) own[i] = i == 0;
            for (int32_t i = 1; i < room; i++) at[i] = width;
            continue;
        }
        widest = found > widest ? found : widest;
        if (found > room || !isfinite(top[row])) continue;
        if (surplus[row] >= 0) {
            Entry *order = malloc(sizeof *order * (size_t)found);
            if (order)
                remove_surplus(own, found, top[row], temperature[row], surplus[row], order);
            else
                failed = 1;
            free(order);
        }
        distribute(own, room, top[row], temperature[row], min_p[row]);
    }
    return failed ? -1 : widest;
}
