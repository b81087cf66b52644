/* Matrices of every kind by rows of inputs. */

enum { OUTPUTS = 16, INPUTS = 32 };

/* Numbers of all rows that the nearest cache holds beside the weights. */
enum { NEARBY = 8192 };

static const size_t TILE_BYTES[] = {256 + 64, 512 + 32};

/* 32 inputs of one row as fixed-point numbers of 16 bits: high * 256 + low, times a scale. */
typedef struct {
    int8_t high[INPUTS], low[INPUTS];
} Group;

/* Rows are multiplied up to ROWS at a time, and the groups that meet the same weights lie beside
 * each other: [rows / ROWS, inputs / 32, ROWS], with fewer at the end for the last rows. */
typedef struct {
    Group *groups;
    float *scales; /* of each group */
    float *totals; /* of what each group's numbers stand for */
    int32_t *zeros; /* 128 times the sum of each group's numbers */
    float *plain;  /* as they were */
    uint16_t *halves; /* as sums of two bfloat16 numbers, for tiles: see take_halves */
    int count;     /* groups of a row */
} Inputs;

/* What kinds of matrices take of their inputs. */
enum { FIXED_POINT = 1, PLAIN = 2, HALVES = 4 };

INLINE int taken_by(const Matrix *w) {
    if (w->kind == FOUR_BITS || w->kind == EIGHT_BITS) return FIXED_POINT;
#if defined(MTPLX_AMX)
    if (w->kind == BFLOAT16) return HALVES;
#endif
    return PLAIN;
}

INLINE int groups_of(int inputs) { return (inputs + INPUTS - 1) / INPUTS; }

INLINE int blocks_of(int outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }

/* The products of a group's inputs by numbers, unsigned by signed bytes, summed for each output. */
INLINE PieceInts dot_group(const int kind, const WideWords *numbers, const int p,
                           const int8_t *inputs) {
    PieceInts sum = {0};
#if defined(MTPLX_AVX512)
    /* As one instruction; compilers make two of the intrinsic, and a broadcast costs as much as a
     * product. */
    UNROLLED for (int i = 0; i < 8; i++)
        __asm__("vpdpbusd %2%{1to16%}, %1, %0"
                : "+v"(sum)
                : "v"(numbers[i].of[p]), "m"(*(const int8_t(*)[4])(inputs + 4 * i)));
#elif defined(MTPLX_AVX2)
    /* By way of 16 bits. */
    __m256i all_fours = _mm256_setzero_si256();
    UNROLLED for (int i = 0; i < 8; i++) {
        int32_t four;
        memcpy(&four, inputs + 4 * i, 4);
        const __m256i x = _mm256_set1_epi32(four), w = (__m256i)numbers[i].of[p];
        if (kind == FOUR_BITS) {
            /* Numbers are below 16, so that the products of all eight fours fit in. */
            all_fours = _mm256_add_epi16(all_fours, _mm256_maddubs_epi16(w, x));
            continue;
        }
        /* With even and odd bytes apart, for the sum of two products of bytes does not. */
        const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
        const __m256i x_odd = _mm256_srai_epi16(x, 8);
        const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255));
        const __m256i odd = _mm256_srli_epi16(w, 8);
        sum += (PieceInts)_mm256_madd_epi16(even, x_even);
        sum += (PieceInts)_mm256_madd_epi16(odd, x_odd);
    }
    if (kind == FOUR_BITS) sum = (PieceInts)_mm256_madd_epi16(all_fours, _mm256_set1_epi16(1));
#else
    for (int i = 0; i < INPUTS; i++)
        sum += (PieceInts)(numbers[i / 4].of[p] >> (8 * (i % 4)) & 255) * (int32_t)inputs[i];
#endif
    return sum;
}

/* acc with what a group of inputs adds, whose number is `at`: products of its high and low bytes. */
INLINE Wide add_group(const int kind, Wide acc, const WideWords *numbers, const Inputs *x, size_t at,
                      Wide scale, Wide minimum) {
    const Group *group = &x->groups[at];
    EACH_PIECE(p) {
        PieceInts exact = dot_group(kind, numbers, p, group->high) * 256 +
                          dot_group(kind, numbers, p, group->low);
        if (kind == EIGHT_BITS) exact -= x->zeros[at];
        acc.of[p] = fused(__builtin_convertvector(exact, Piece), scale.of[p] * x->scales[at],
                          acc.of[p]);
        if (kind == FOUR_BITS) acc.of[p] = fused(minimum.of[p], same(x->totals[at]), acc.of[p]);
    }
    return acc;
}

/* One row of tiles by `rows` rows of inputs, up to ROWS, from `first` on. */
INLINE void row_of_tiles(const int kind, const uint8_t *tile, const Inputs *x, int first,
                         const int rows, Lanes *result) {
    const int count = x->count;
    const size_t bytes = TILE_BYTES[kind];
    /* Known here alone, and every loop over it unrolled, so that it stays in registers. */
    Wide acc[ROWS];
    UNROLLED for (int m = 0; m < rows; m++) acc[m] = nothing();
    for (int g = 0; g < count; g++, tile += bytes) {
        /* Numbers, for no pointer may go past the end. Far ahead into the larger cache, and from
         * there into the nearer one. */
        const uintptr_t near = (uintptr_t)tile + 4 * bytes, far = (uintptr_t)tile + 24 * bytes;
        for (size_t line = 0; line < bytes; line += 64) {
            __builtin_prefetch((const void *)(far + line), 0, 2);
            __builtin_prefetch((const void *)(near + line), 0, 3);
        }
        WideWords numbers[8];
        EACH_PIECE(p) {
            if (kind == FOUR_BITS) {
                UNROLLED for (int i = 0; i < 4; i++) {
                    const PieceWords both = *(const PieceWords *)(tile + 64 * i + PIECE_BYTES * p);
                    numbers[i].of[p] = both & 0x0f0f0f0f;
                    numbers[i + 4].of[p] = both >> 4 & 0x0f0f0f0f;
                }
            } else {
                UNROLLED for (int i = 0; i < 8; i++)
                    numbers[i].of[p] = *(const PieceWords *)(tile + 64 * i + PIECE_BYTES * p);
            }
        }
        const Wide scale = from_halves(tile + (kind == FOUR_BITS ? 256 : 512));
        const Wide minimum = kind == FOUR_BITS ? from_halves(tile + 288) : nothing();
        UNROLLED for (int m = 0; m < rows; m++)
            acc[m] = add_group(kind, acc[m], numbers, x, (size_t)first * count + (size_t)g * rows + m,
                               scale, minimum);
    }
    UNROLLED for (int m = 0; m < rows; m++) store_wide(acc[m], (float *)&result[m]);
}

/* The outputs of one block, whose weights are plain numbers, by `rows` rows of inputs, up to ROWS,
 * from `first` on. */
INLINE void plain_rows(const int kind, const Matrix *w, int block, const Inputs *x, int first,
                       const int rows, Lanes *result) {
    /* Outputs whose sums the registers hold at a time, and inputs that the nearest cache does. */
    const int some = SUMS / rows >= 4 ? 4 : SUMS / rows >= 2 ? 2 : 1;
    const int stretch = NEARBY / rows / INPUTS * INPUTS;
    const size_t bytes = kind == BFLOAT16 ? 2 : 4, row_bytes = bytes * w->inputs;
    const int begin = block * OUTPUTS;
    const int width = w->outputs - begin < OUTPUTS ? w->outputs - begin : OUTPUTS;
    const uint8_t *weights = w->weights + row_bytes * begin;
    const float *plain = x->plain + (size_t)first * x->count * INPUTS;
    const int whole = w->inputs / INPUTS * INPUTS;
    uint8_t rest[4][4 * INPUTS] = {0};
    Lanes sums[ROWS][OUTPUTS];
    for (int from = 0; from < w->inputs; from += stretch) {
        const int to = w->inputs - from < stretch ? w->inputs : from + stretch;
        for (int n = 0; n < OUTPUTS; n += some) {
            const uint8_t *row[4];
            Wide acc[4][ROWS];
            UNROLLED for (int i = 0; i < some; i++) {
                /* What is behind the last output is computed as that one, and not taken. */
                row[i] = weights + row_bytes * (n + i < width ? n + i : width - 1);
                UNROLLED for (int m = 0; m < rows; m++)
                    acc[i][m] = from ? load_wide((const float *)&sums[m][n + i]) : nothing();
            }
            /* Fetched ahead is what comes next: the outputs that follow, or the first ones again
             * where another stretch does. */
            const size_t ahead = n + some < OUTPUTS || to == w->inputs
                                     ? row_bytes * some
                                     : bytes * stretch - row_bytes * (OUTPUTS - some);
            const float *in = plain + (size_t)from * rows;
            /* A last group that is none, with zeros behind it. */
            UNROLLED for (int i = 0; i < some; i++)
                if (to > whole) memcpy(rest[i], row[i] + bytes * whole, bytes * (to - whole));
            for (int k = from; k < to; k += INPUTS, in += INPUTS * rows) {
                const uint8_t *these[4];
                UNROLLED for (int i = 0; i < some; i++) {
                    these[i] = row[i] + bytes * k;
                    for (size_t line = 0; line < bytes * INPUTS; line += 64)
                        __builtin_prefetch((const void *)((uintptr_t)these[i] + ahead + line), 0, 2);
                    if (k == whole) these[i] = rest[i];
                }
                UNROLLED for (int h = 0; h < INPUTS; h += 16) {
                    Wide part[4];
                    UNROLLED for (int i = 0; i < some; i++)
                        part[i] = kind == BFLOAT16 ? from_bfloat16((const uint16_t *)these[i] + h)
                                                   : load_wide((const float *)these[i] + h);
                    UNROLLED for (int m = 0; m < rows; m++) {
                        const Wide x_part = load_wide(in + INPUTS * m + h);
                        UNROLLED for (int i = 0; i < some; i++)
                            acc[i][m] = add_product(part[i], x_part, acc[i][m]);
                    }
                }
            }
            UNROLLED for (int m = 0; m < rows; m++) UNROLLED for (int i = 0; i < some; i++)
                store_wide(acc[i][m], (float *)&sums[m][n + i]);
        }
    }
    UNROLLED for (int m = 0; m < rows; m++) result[m] = sums_of(sums[m]);
}

/* What a block of outputs makes of some rows, with its bias, into y [rows, outputs] or onto it. */
INLINE void put(const Matrix *w, const Lanes *acc, int first, int some, int block, float *y,
                int add) {
    const int begin = block * OUTPUTS;
    const int width = w->outputs - begin < OUTPUTS ? w->outputs - begin : OUTPUTS;
    const float *bias = w->bias ? w->bias + begin : NULL;
    for (int m = 0; m < some; m++) {
        float *to_y = y + (size_t)(first + m) * w->outputs + begin;
        if (width == OUTPUTS) {
            Lanes value = bias ? acc[m] + load(bias) : acc[m];
            if (add) value += load(to_y);
            memcpy(to_y, &value, sizeof value);
            continue;
        }
        float out[OUTPUTS];
        memcpy(out, &acc[m], sizeof out);
        for (int i = 0; i < width; i++) {
            const float value = bias ? out[i] + bias[i] : out[i];
            to_y[i] = add ? to_y[i] + value : value;
        }
    }
}

/* Blocks `from` to `to` by up to ROWS rows of inputs, from `first` on. */
INLINE void some_rows(const int kind, const Matrix *w, const Inputs *x, int first, const int rows,
                      int from, int to, float *y, int add) {
    for (int block = from; block < to; block++) {
        Lanes acc[ROWS];
        if (kind == BFLOAT16 || kind == FLOAT32)
            plain_rows(kind, w, block, x, first, rows, acc);
        else
            row_of_tiles(kind, w->weights + TILE_BYTES[kind] * x->count * (size_t)block, x, first,
                         rows, acc);
        put(w, acc, first, rows, block, y, add);
    }
}

#include "products_amx.h"

/* What is more than ROWS is never met, and no code is made for it. */
#define CASE(kind, n) \
    case (kind) * 9 + (n): \
        if (n <= ROWS) some_rows(kind, w, x, first, n, from, to, y, add); \
        break;
#define EACH(kind) \
    CASE(kind, 1) CASE(kind, 2) CASE(kind, 3) CASE(kind, 4) \
    CASE(kind, 5) CASE(kind, 6) CASE(kind, 7) CASE(kind, 8)

/* Blocks `from` to `to` by all rows of inputs, into y [rows, outputs]; `then` is needed next. */
static void multiply(const Matrix *w, const Inputs *x, int rows, int from, int to, float *y,
                     int add, const uint8_t *then) {
#if defined(MTPLX_AMX)
    if (w->kind == BFLOAT16) {
        for (int first = 0, shaped = 0; first < rows; first += ROWS) {
            const int some = rows - first < ROWS ? rows - first : ROWS;
            if (some != shaped) shape_tiles(shaped = some);
            tile_rows(w, x, first, some, from, to, y, add, then);
        }
        return;
    }
#endif
    for (int first = 0; first < rows; first += ROWS) {
        const int some = rows - first < ROWS ? rows - first : ROWS;
        switch (w->kind * 9 + some) {
            EACH(FOUR_BITS) EACH(EIGHT_BITS) EACH(FLOAT32)
#if !defined(MTPLX_AMX)
            EACH(BFLOAT16)
#endif
        }
    }
}

/* A row of `size` numbers as matrices take them, padded with zeros to whole groups. */
static void take_row(const float *x, int row, int rows, int size, int forms, Inputs *in) {
    const int first = row / ROWS * ROWS, some = rows - first < ROWS ? rows - first : ROWS;
    for (int g = 0; g < in->count; g++, x += INPUTS) {
        const size_t at = (size_t)first * in->count + (size_t)g * some + (row - first);
        const int left = size - INPUTS * g;
        float padded[INPUTS] = {0};
        if (left < INPUTS) memcpy(padded, x, sizeof(float) * left);
        const float *from = left < INPUTS ? padded : x;
        const Lanes part[2] = {load(from), load(from + 16)};
        if (forms & PLAIN) memcpy(in->plain + at * INPUTS, part, sizeof part);
#if defined(MTPLX_AMX)
        if (forms & HALVES)
            take_halves(from, in->halves + 2 * INPUTS * (at - (row - first)), row - first, some);
#endif
        if (!(forms & FIXED_POINT)) continue;
        /* Without their signs floats are ordered as their bits are. */
        const Ints one = (Ints)part[0] & 0x7fffffff, other = (Ints)part[1] & 0x7fffffff;
        const Ints above = one > other;
        const int32_t most = most_of((one & above) | (other & ~above));
        float largest;
        memcpy(&largest, &most, 4);
        /* The largest becomes 127 * 256, so that its high byte does not overflow. What is so small
         * that its inverse might is nothing. */
        const float unit = largest > 1e-30f ? 32512 / largest : 0;
        /* Where not all are finite, the numbers are 0 and the scale is not finite. */
        const Ints finite = (Ints){0} - (most < 0x7f800000);
        Ints total = {0};
        for (int h = 0; h < 2; h++) {
            /* Rounded to the nearest by the number behind which floats have no fractions. */
            const Lanes rounded = (part[h] * unit + 12582912.0f) - 12582912.0f;
            const Ints number =
                __builtin_convertvector((Lanes)((Ints)rounded & finite), Ints);
            /* A signed low byte is what is left above or below the nearest high one. */
            const Bytes high = __builtin_convertvector((number + 128) >> 8, Bytes);
            const Bytes low = __builtin_convertvector(number, Bytes);
            memcpy(in->groups[at].high + 16 * h, &high, 16);
            memcpy(in->groups[at].low + 16 * h, &low, 16);
            total += number;
        }
        in->scales[at] = largest / 32512;
        const int32_t sum = total_of(total);
        in->totals[at] = in->scales[at] * (float)sum;
        in->zeros[at] = 128 * sum;
    }
}

static void take_rows(const float *x, int rows, int size, int forms, Inputs *in) {
    in->count = groups_of(size);
    for (int m = 0; m < rows; m++) take_row(x + (size_t)m * size, m, rows, size, forms, in);
}
