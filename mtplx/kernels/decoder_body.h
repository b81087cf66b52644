/* The pass itself: compiled once for each instruction set, whose file defines SET_NAME and SET. */

#include <float.h>
#include <math.h>
#include <string.h>

#include "decoder.h"

#ifdef _OPENMP
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#else
#define THREAD 0
#define THREADS 1
#endif

typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1)));

/* Sixteen numbers again, in vectors as wide as the CPU's: compilers keep wider ones in memory, which
 * the loops that most of the time goes into cannot afford. */
#if defined(MTPLX_AVX512)
#define PIECE_BYTES 64
#elif defined(MTPLX_AVX2)
#define PIECE_BYTES 32
#else
#define PIECE_BYTES 16
#endif
enum { PIECES = 64 / PIECE_BYTES, PIECE = 16 / PIECES };
typedef float Piece __attribute__((vector_size(PIECE_BYTES), aligned(4), may_alias));
typedef int32_t PieceInts __attribute__((vector_size(PIECE_BYTES), aligned(4), may_alias));
typedef uint32_t PieceWords __attribute__((vector_size(PIECE_BYTES), aligned(4), may_alias));
typedef uint16_t PieceHalves __attribute__((vector_size(PIECE_BYTES / 2), aligned(2)));
typedef struct {
    Piece of[PIECES];
} Wide;
typedef struct {
    PieceInts of[PIECES];
} WideInts;
typedef struct {
    PieceWords of[PIECES];
} WideWords;

#define UNROLLED _Pragma("GCC unroll 8")
#define EACH_PIECE(p) UNROLLED for (int p = 0; p < PIECES; p++)
#define INLINE static inline __attribute__((always_inline))
enum { OUTPUTS = 16, INPUTS = 32 };

/* Numbers of all rows that the nearest cache holds beside the weights. */
enum { NEARBY = 8192 };

/* What the registers hold sums of: rows of a multiplication, queries of an attention with so many
 * vectors of each. The room for the scores of queries is the same for all sets. */
enum { MOST_QUERIES = 6 };
#if defined(MTPLX_AVX512)
enum { ROWS = 8, QUERIES = MOST_QUERIES, PARTS = 4, SUMS = 16 };
#elif defined(MTPLX_AVX2)
enum { ROWS = 4, QUERIES = 3, PARTS = 1, SUMS = 4 };
#else
enum { ROWS = 2, QUERIES = 1, PARTS = 1, SUMS = 2 };
#endif

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

INLINE Lanes all(float x) { return x - (Lanes){0}; }

INLINE Piece same(float x) { return x - (Piece){0}; }

/* a * b + c, rounded once where the CPU can do so. */
INLINE Piece fused(Piece a, Piece b, Piece c) {
#if defined(MTPLX_AVX512)
    return (Piece)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(MTPLX_AVX2)
    return (Piece)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE Wide nothing(void) {
    Wide v;
    EACH_PIECE(p) v.of[p] = same(0);
    return v;
}

INLINE Wide add_product(Wide a, Wide b, Wide c) {
    EACH_PIECE(p) c.of[p] = fused(a.of[p], b.of[p], c.of[p]);
    return c;
}

INLINE Wide add_multiple(Wide a, float b, Wide c) {
    const Piece factor = same(b);
    EACH_PIECE(p) c.of[p] = fused(a.of[p], factor, c.of[p]);
    return c;
}

/* Not by memcpy, which compilers make go through memory. */
INLINE Wide load_wide(const float *x) {
    Wide v;
    EACH_PIECE(p) v.of[p] = *(const Piece *)(x + PIECE * p);
    return v;
}

INLINE void store_wide(Wide x, float *y) {
    EACH_PIECE(p) *(Piece *)(y + PIECE * p) = x.of[p];
}

INLINE Lanes load(const float *x) {
    Lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}

INLINE float sum_of(Lanes v) {
    /* In one order, whatever the compiler. */
    float a[16];
    memcpy(a, &v, sizeof a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}

/* These are the same in any order. */
INLINE int32_t most_of(Ints v) {
#if defined(MTPLX_AVX512)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t a[16], most = INT32_MIN;
    memcpy(a, &v, sizeof a);
    for (int i = 0; i < 16; i++) most = a[i] > most ? a[i] : most;
    return most;
#endif
}

INLINE int32_t total_of(Ints v) {
#if defined(MTPLX_AVX512)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t a[16], sum = 0;
    memcpy(a, &v, sizeof a);
    for (int i = 0; i < 16; i++) sum += a[i];
    return sum;
#endif
}

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

/* The sums of 16 vectors' numbers, each in the order of `sum_of`. The vectors are written to. */
INLINE Lanes sums_of(Lanes *v) {
    /* Halves of two vectors, then quarters of four, beside each other, until all 16 are. */
    UNROLLED for (int i = 0; i < 8; i++)
        v[i] = SHUFFLED(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLED(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    UNROLLED for (int i = 0; i < 4; i++)
        v[i] = SHUFFLED(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLED(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    UNROLLED for (int i = 0; i < 2; i++)
        v[i] = SHUFFLED(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLED(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLED(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLED(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

INLINE float largest_of(Lanes v) {
    float a[16], largest = -INFINITY;
    memcpy(a, &v, sizeof a);
    for (int i = 0; i < 16; i++) largest = a[i] > largest ? a[i] : largest;
    return largest;
}

INLINE Wide from_bfloat16(const uint16_t *x) {
    Wide v;
    EACH_PIECE(p) {
        const uint16_t *own = x + PIECE * p;
        /* Compilers make six instructions of the conversion in general. */
#if defined(MTPLX_AVX512)
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)own));
        v.of[p] = (Piece)_mm512_slli_epi32(wide, 16);
#elif defined(MTPLX_AVX2)
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)own));
        v.of[p] = (Piece)_mm256_slli_epi32(wide, 16);
#else
        PieceHalves h;
        memcpy(&h, own, sizeof h);
        v.of[p] = (Piece)(__builtin_convertvector(h, PieceWords) << 16);
#endif
    }
    return v;
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64); /* NaN stays one */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE Wide from_halves(const uint8_t *x) {
    Wide v;
    EACH_PIECE(p) {
        const uint8_t *own = x + 2 * PIECE * p;
#if defined(MTPLX_AVX512)
        v.of[p] = (Piece)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)own));
#elif defined(MTPLX_AVX2)
        v.of[p] = (Piece)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)own));
#else
        PieceHalves h;
        memcpy(&h, own, sizeof h);
        const PieceWords w = __builtin_convertvector(h, PieceWords);
        /* Exponent and mantissa moved into place, 112 more in the exponent by a multiplication that
         * also makes subnormal numbers normal. */
        const Piece shifted = (Piece)((w & 0x7fff) << 13) * 0x1p112f;
        v.of[p] = (Piece)((PieceWords)shifted | (w & 0x8000) << 16);
#endif
    }
    return v;
}

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

#if defined(MTPLX_AMX)
/* --- by tiles ------------------------------------------------------------------------------------ */

/* A tile's instruction adds up products of 16 outputs' weights, 32 each, by those of up to 16
 * columns of inputs. An input is the sum of two bfloat16 numbers, which have a column each: so much
 * of it is left as of fixed-point numbers. What a column comes to depends on no other.
 *
 * Four blocks of outputs are computed at a time: the sums of a single one would wait for each other.
 * The weights that come after them are fetched meanwhile, where the larger cache holds as many, in
 * several streams from front to back; memory's own prefetching then goes ahead of each. */
enum { BLOCKS = 4, HELD = 512 * 1024, STREAMS = 8, AHEAD = 16 };

/* One group of a row, of `rows`: the columns of all begin with the first halves, and two inputs of a
 * column lie beside each other, [INPUTS / 2, 2, rows, 2]. */
static void take_halves(const float *x, uint16_t *y, int row, int rows) {
    uint32_t first[INPUTS / 2], second[INPUTS / 2];
    for (int h = 0; h < 2; h++) {
        const __m512 all_of_it = _mm512_loadu_ps(x + 16 * h);
        const __m512i bits = _mm512_castps_si512(all_of_it);
        const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(all_of_it));
        /* What would be rounded up to infinity is cut off, and infinity has no rest. */
        const __mmask16 largest = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(0x7f7f7fff)) &
                                  _mm512_cmple_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
        const __mmask16 finite = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
        high = _mm512_mask_srli_epi32(high, largest, bits, 16);
        const __m512 taken = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
        const __m256i near = _mm512_cvtepi32_epi16(high);
        const __m256i rest =
            (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, all_of_it, taken));
        memcpy(first + 8 * h, &near, sizeof near);
        memcpy(second + 8 * h, &rest, sizeof rest);
    }
    for (int i = 0; i < INPUTS / 2; i++) {
        memcpy(y + 2 * ((2 * i) * rows + row), first + i, 4);
        memcpy(y + 2 * ((2 * i + 1) * rows + row), second + i, 4);
    }
}

/* Compilers do not all know how much these instructions read and write, and leave out what seems to
 * be written for nothing. */
#define WRITTEN(where) __asm__ volatile("" : : "r"(where) : "memory")

/* Shapes of tiles. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

static void shape_tiles(int rows) {
    Shapes shapes = {1, 0, {0}, {0}, {0}};
    for (int i = 0; i < 8; i++) {
        /* Sums are 0 to 3, weights 4 to 6, inputs 7. */
        shapes.rows[i] = 16;
        shapes.bytes[i] = i < 4 || i == 7 ? (uint16_t)(8 * rows) : 64;
    }
    WRITTEN(&shapes);
    _tile_loadconfig(&shapes);
}

/* A thread's tiles are as another library left them, which may think that it finds them so. */
INLINE void borrow_tiles(Shapes *shapes) {
    _tile_storeconfig(shapes);
    WRITTEN(shapes);
}

INLINE void return_tiles(const Shapes *shapes) {
    WRITTEN(shapes);
    if (shapes->palette)
        _tile_loadconfig(shapes);
    else
        _tile_release();
}

/* Part `k` of `count` of what lies from `next` on, so many bytes of each stream. */
INLINE void fetch_part(uintptr_t next, size_t bytes, int k, int count) {
    const size_t lines = bytes / 64, end = lines * (k + 1) / count;
    for (size_t line = lines * k / count; line < end; line++)
        for (int i = 0; i < STREAMS; i++)
            __builtin_prefetch((const void *)(next + bytes * i + 64 * line), 0, 2);
}

/* One group of inputs by their weights of block i. */
#define STEP(i, weights) \
    if (count > i) { \
        _tile_loadd(weights, from[i], stride[i]); \
        _tile_dpbf16ps(i, weights, 7); \
        from[i] += step[i]; \
    }

#define TAKE(i) \
    if (count > i) _tile_stored(i, sums[i], 64);

/* Blocks `begin` to `end` by up to ROWS rows of inputs, from `first` on. What `then` points to is
 * needed next. */
static void tile_rows(const Matrix *w, const Inputs *x, int first, int rows, int begin, int end,
                      float *y, int add, const uint8_t *then) {
    const size_t row_bytes = sizeof(uint16_t) * w->inputs;
    const int whole = w->inputs / INPUTS, rest = w->inputs % INPUTS;
    const uint8_t *inputs = (const uint8_t *)(x->halves + (size_t)first * x->count * 2 * INPUTS);
    const size_t panel = sizeof(uint16_t) * 2 * INPUTS * rows;
    WRITTEN(inputs);
    _Alignas(64) float sums[BLOCKS][16][16];
    _Alignas(64) uint8_t padded[BLOCKS][16][64];
    const __m512i lines = _mm512_slli_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
    for (int block = begin; block < end; block += BLOCKS) {
        const int count = end - block < BLOCKS ? end - block : BLOCKS;
        const uint8_t *region = w->weights + row_bytes * OUTPUTS * (size_t)block;
        const int left = w->outputs - OUTPUTS * block;
        const int outputs = left < OUTPUTS * count ? left : OUTPUTS * count;
        const int few = outputs - OUTPUTS * (count - 1); /* of the last block */
        const int holds = row_bytes * OUTPUTS * BLOCKS <= HELD;
        const uintptr_t next =
            (uintptr_t)(block + count < end ? region + row_bytes * outputs : then);
        const uint8_t *from[BLOCKS];
        size_t stride[BLOCKS], step[BLOCKS];
        for (int i = 0; i < count; i++) {
            from[i] = region + row_bytes * OUTPUTS * i;
            stride[i] = row_bytes;
            step[i] = 64;
        }
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < x->count; k++) {
            const int last = k == whole;
            if (last || few < OUTPUTS) {
                /* Outputs and inputs that are not there are zeros. */
                const size_t bytes = last ? sizeof(uint16_t) * rest : 64;
                for (int i = last ? 0 : count - 1; i < count; i++) {
                    const int some = i < count - 1 ? OUTPUTS : few;
                    memset(padded[i], 0, sizeof padded[i]);
                    for (int n = 0; n < some; n++)
                        memcpy(padded[i][n], region + row_bytes * (OUTPUTS * i + n) + 64 * k, bytes);
                    from[i] = padded[i][0];
                    stride[i] = 64;
                    step[i] = 0;
                }
                WRITTEN(padded);
            }
            if (holds)
                fetch_part(next, row_bytes * OUTPUTS * BLOCKS / STREAMS, k, x->count);
            else
                for (int n = 0; n < outputs; n++)
                    __builtin_prefetch(
                        (const void *)((uintptr_t)region + row_bytes * n + 64 * (k + AHEAD)), 0, 2);
            _tile_loadd(7, inputs + panel * k, 8 * rows);
            STEP(0, 4) STEP(1, 5) STEP(2, 6) STEP(3, 4)
        }
        TAKE(0) TAKE(1) TAKE(2) TAKE(3)
        for (int i = 0; i < count; i++) {
            Lanes result[ROWS];
            for (int m = 0; m < rows; m++)
                result[m] = (Lanes)_mm512_add_ps(_mm512_i32gather_ps(lines, &sums[i][0][m], 4),
                                                 _mm512_i32gather_ps(lines, &sums[i][0][rows + m], 4));
            put(w, result, first, rows, block + i, y, add);
        }
    }
}
#else
typedef int Shapes;
INLINE void borrow_tiles(Shapes *shapes) { *shapes = 0; }
INLINE void return_tiles(const Shapes *shapes) { (void)shapes; }
#endif

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

/* x / sqrt(mean(x^2) + epsilon) * weight */
static void norm(const float *x, const float *weight, int size, float epsilon, float *y) {
    Lanes squares = all(0);
    int i = 0;
    for (; i + 16 <= size; i += 16) squares += load(x + i) * load(x + i);
    float sum = sum_of(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float factor = 1 / sqrtf(sum / size + epsilon);
    for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

/* The first half of a head turned against the second, in place. */
static void rotate(float *x, const float *cos, const float *sin, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* A position's key and value, into the part of the cache from `at` on that is its slot's and head's.
 * Keys lie in blocks of 16 positions, a number of all beside each other. */
static void keep(const Cache *cache, size_t at, int position, int size, const float *k,
                 const float *v) {
    const size_t key = at + (size_t)(position / 16 * 16) * size + position % 16;
    const size_t value = at + (size_t)position * size;
    if (cache->narrow) {
        uint16_t *keys = (uint16_t *)cache->keys + key, *values = (uint16_t *)cache->values + value;
        for (int j = 0; j < size; j++) keys[16 * j] = to_bfloat16(k[j]);
        for (int j = 0; j < size; j++) values[j] = to_bfloat16(v[j]);
    } else {
        float *keys = (float *)cache->keys + key;
        for (int j = 0; j < size; j++) keys[16 * j] = k[j];
        memcpy((float *)cache->values + value, v, sizeof(float) * size);
    }
}

/* What is read `bytes` behind a number of the cache, fetched in time: memory's own prefetching stops
 * at the end of every page. */
enum { EXPECTED = 4096 };
INLINE void expect(const int narrow, const void *where, size_t at, size_t bytes) {
    __builtin_prefetch((const void *)((uintptr_t)where + at * (narrow ? 2 : 4) + bytes), 0, 3);
}

INLINE Wide kept(const int narrow, const void *where, size_t at) {
    return narrow ? from_bfloat16((const uint16_t *)where + at)
                  : load_wide((const float *)where + at);
}

/* e to the power of x <= 0, as good as float32 is: 2^n (1 + a polynomial), in lanes. What lies below
 * -87, or is no number, is taken for -87. */
INLINE Lanes exponential(Lanes x) {
    const Lanes least = all(-87.0f);
    const Ints above = x > least;
    x = (Lanes)(((Ints)x & above) | ((Ints)least & ~above));
    Lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    Lanes r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Lanes)exponent;
}

/* A query of one position and head: its numbers, how many keys it looks at, and where to. */
typedef struct {
    const float *q;
    int length;
    float *y;
} Query;

/* What `n` queries take of the values' numbers from `begin` on, 16 times `parts` of them. */
INLINE void mix(const int narrow, const int n, const int parts, const Query *query,
                const void *values, size_t at, int size, int begin, int shortest,
                const float *scores, size_t stride, const float *share) {
    Wide sum[QUERIES][PARTS];
    UNROLLED for (int r = 0; r < n; r++) UNROLLED for (int i = 0; i < parts; i++)
        sum[r][i] = nothing();
    for (int t = 0; t < shortest; t++) {
        Wide value[PARTS];
        UNROLLED for (int i = 0; i < parts; i++) {
            value[i] = kept(narrow, values, at + (size_t)t * size + begin + 16 * i);
            if (i % 2 == 0) expect(narrow, values, at + (size_t)t * size + begin + 16 * i, EXPECTED);
        }
        UNROLLED for (int r = 0; r < n; r++) UNROLLED for (int i = 0; i < parts; i++)
            sum[r][i] = add_multiple(value[i], scores[r * stride + t], sum[r][i]);
    }
    UNROLLED for (int r = 0; r < n; r++) {
        for (int t = shortest; t < query[r].length; t++) UNROLLED for (int i = 0; i < parts; i++)
            sum[r][i] = add_multiple(kept(narrow, values, at + (size_t)t * size + begin + 16 * i),
                                     scores[r * stride + t], sum[r][i]);
        UNROLLED for (int i = 0; i < parts; i++) {
            Wide mean = sum[r][i];
            EACH_PIECE(p) mean.of[p] *= share[r];
            store_wide(mean, query[r].y + begin + 16 * i);
        }
    }
}

/* `n` queries over the keys and values from `at` on, which are read once for all. What one of them
 * gets does not depend on the others. `scores` has room for each, `stride` apart. */
INLINE void attend_some(const int narrow, const int n, const Query *query, const void *keys,
                        const void *values, size_t at, int size, float scale, float *scores,
                        size_t stride) {
    int shortest = query[0].length, longest = shortest;
    for (int r = 1; r < n; r++) {
        shortest = query[r].length < shortest ? query[r].length : shortest;
        longest = query[r].length > longest ? query[r].length : longest;
    }
    for (int t = 0; t < longest; t += 16) {
        /* Sixteen keys at a time, in two sums that need not wait for each other. */
        const size_t block = at + (size_t)t * size;
        Wide even[QUERIES], odd[QUERIES];
        UNROLLED for (int r = 0; r < n; r++) even[r] = odd[r] = nothing();
        for (int i = 0; i < size; i += 2) {
            const Wide first = kept(narrow, keys, block + (size_t)i * 16);
            expect(narrow, keys, block + (size_t)i * 16, EXPECTED);
            const Wide second = kept(narrow, keys, block + (size_t)i * 16 + 16);
            UNROLLED for (int r = 0; r < n; r++) {
                even[r] = add_multiple(first, query[r].q[i], even[r]);
                odd[r] = add_multiple(second, query[r].q[i + 1], odd[r]);
            }
        }
        UNROLLED for (int r = 0; r < n; r++) {
            Wide dot = even[r];
            EACH_PIECE(p) dot.of[p] = (dot.of[p] + odd[r].of[p]) * scale;
            store_wide(dot, scores + r * stride + t);
        }
    }
    float share[QUERIES];
    for (int r = 0; r < n; r++) {
        float *own = scores + r * stride;
        const int length = query[r].length;
        for (int line = 0; line < EXPECTED; line += 64 * n)
            expect(narrow, values, at, (size_t)(line + 64 * r));
        for (int t = length; t % 16; t++) own[t] = -FLT_MAX;
        /* Scores that are no finite numbers would get lost in comparisons: they show in a sum. */
        Lanes highest = all(-INFINITY), spoiled = all(0);
        for (int t = 0; t < length; t += 16) {
            const Lanes next = load(own + t);
            const Ints above = next > highest;
            highest = (Lanes)(((Ints)next & above) | ((Ints)highest & ~above));
            spoiled += next * 0;
        }
        const float top = largest_of(highest);
        Lanes total = all(0);
        for (int t = 0; t < length; t += 16) {
            Lanes e = exponential(load(own + t) - top);
            memcpy(own + t, &e, sizeof e);
            for (int i = length; i < t + 16; i++) own[i] = 0;
            total += load(own + t);
        }
        share[r] = 1 / sum_of(total) + sum_of(spoiled);
    }
    int begin = 0;
    for (; begin + 16 * PARTS <= size; begin += 16 * PARTS)
        mix(narrow, n, PARTS, query, values, at, size, begin, shortest, scores, stride, share);
    for (; begin < size; begin += 16)
        mix(narrow, n, 1, query, values, at, size, begin, shortest, scores, stride, share);
}

#define CASE_OF(n) \
    case n: \
        if (n <= QUERIES) \
            attend_some(1, n, query, cache->keys, cache->values, at, size, scale, scores, stride); \
        break;

static void attend(const Cache *cache, int n, const Query *query, size_t at, int size, float scale,
                   float *scores) {
    const size_t stride = (size_t)cache->capacity + 16;
    if (cache->narrow) {
        switch (n) { CASE_OF(1) CASE_OF(2) CASE_OF(3) CASE_OF(4) CASE_OF(5) CASE_OF(6) }
        return;
    }
    for (int r = 0; r < n; r++)
        attend_some(0, 1, query + r, cache->keys, cache->values, at, size, scale, scores, stride);
}

/* up * gate / (1 + e^-gate), into up. */
static void gate_with(const float *gate, float *up, int count) {
    for (int i = 0; i < count; i += 16) {
        /* A part of a vector is computed as a whole one. */
        const int some = count - i;
        Lanes g = all(0), u = all(0);
        if (some >= 16) {
            g = load(gate + i), u = load(up + i);
        } else {
            memcpy(&g, gate + i, sizeof(float) * some);
            memcpy(&u, up + i, sizeof(float) * some);
        }
        /* By e^-|g|, which does not overflow. */
        const Ints negative = (Ints)g >> 31;
        const Lanes e = exponential((Lanes)((Ints)g | (int32_t)0x80000000));
        const Lanes plus = 1 / (1 + e), minus = plus * e;
        u *= g * (Lanes)(((Ints)minus & negative) | ((Ints)plus & ~negative));
        if (some >= 16)
            memcpy(up + i, &u, sizeof u);
        else
            memcpy(up + i, &u, sizeof(float) * some);
    }
}

/* --- the pass -------------------------------------------------------------------------------- */

/* Where the threads of a pass wait for each other, a dozen times in every layer. They spin, for the
 * others are mostly near; but where another program has taken a CPU, one thread would spin as long as
 * the other is not let run, which OpenMP's own barrier does: it was seen to cost sixty times the
 * pass. So the CPU is offered to others in between. */
typedef struct {
#ifdef _OPENMP
    atomic_int arrived, round;
#else
    int unused;
#endif
} Meeting;

enum { SPINS = 1000 };

static void meet(Meeting *meeting, int threads) {
#ifdef _OPENMP
    if (threads == 1) return;
    const int round = atomic_load_explicit(&meeting->round, memory_order_acquire);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->round, round + 1, memory_order_release);
        return;
    }
    for (int i = 0; atomic_load_explicit(&meeting->round, memory_order_acquire) == round; i++) {
        if (i >= SPINS) {
            sched_yield();
            continue;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
#else
    (void)meeting;
    (void)threads;
#endif
}

typedef struct {
    float *q, *k, *v, *attended, *gate, *up;
    uintptr_t own; /* of the first thread; the others' follow */
    size_t own_bytes;
} Room;

typedef struct {
    Inputs in;
    float *normed, *scores;
} Own;

static int widest(const Decoder *d) {
    int width = d->hidden;
    const int others[] = {d->heads * d->head_size, d->intermediate, d->layer[0].q.inputs};
    for (int i = 0; i < 3; i++) width = others[i] > width ? others[i] : width;
    return width;
}

/* The next `bytes` of the scratch memory, in whole lines of the cache. */
static void *cut(uintptr_t *at, size_t bytes) {
    const uintptr_t here = *at;
    *at += (bytes + 63) / 64 * 64;
    return (void *)here;
}

static Inputs cut_inputs(uintptr_t *at, int rows, int size) {
    const size_t groups = (size_t)rows * groups_of(size);
    Inputs in;
    in.groups = cut(at, groups * sizeof(Group));
    in.scales = cut(at, groups * sizeof(float));
    in.totals = cut(at, groups * sizeof(float));
    in.zeros = cut(at, groups * sizeof(int32_t));
    in.plain = cut(at, groups * INPUTS * sizeof(float));
    in.halves = cut(at, groups * INPUTS * 2 * sizeof(uint16_t));
    in.count = groups_of(size);
    return in;
}

static Own cut_own(uintptr_t *at, const Decoder *d, int rows, int capacity) {
    Own own;
    own.in = cut_inputs(at, rows, widest(d));
    own.normed = cut(at, sizeof(float) * rows * widest(d));
    own.scores = cut(at, sizeof(float) * MOST_QUERIES * ((size_t)capacity + 16));
    return own;
}

static Room cut_room(uintptr_t *at, const Decoder *d, int rows, int threads, int capacity) {
    const size_t row = sizeof(float) * rows;
    Room room;
    room.q = cut(at, row * d->heads * d->head_size);
    room.k = cut(at, row * d->kv_heads * d->head_size);
    room.v = cut(at, row * d->kv_heads * d->head_size);
    room.attended = cut(at, row * d->heads * d->head_size);
    room.gate = cut(at, row * d->intermediate);
    room.up = cut(at, row * d->intermediate);
    room.own = *at;
    cut_own(at, d, rows, capacity);
    room.own_bytes = *at - room.own;
    *at = room.own + threads * room.own_bytes;
    return room;
}

/* A thread's share of a matrix's blocks of outputs. */
typedef struct {
    int from, to;
} Share;

static Share share_of(int outputs, int thread, int threads) {
    const int64_t blocks = blocks_of(outputs);
    const Share share = {(int)(blocks * thread / threads), (int)(blocks * (thread + 1) / threads)};
    return share;
}

/* A thread's share of a product, after which it multiplies by its share of another matrix. */
static void my_part(const Matrix *w, const Inputs *in, int rows, int thread, int threads, float *y,
                    int add, const Matrix *then) {
    const Share share = share_of(w->outputs, thread, threads);
    const uint8_t *next = w->weights;
    if (then->kind == BFLOAT16)
        next = then->weights + sizeof(uint16_t) * then->inputs * OUTPUTS *
                                   (size_t)share_of(then->outputs, thread, threads).from;
    multiply(w, in, rows, share.from, share.to, y, add, next);
}

static void norm_rows(const float *x, const float *weight, const Decoder *d, int rows, float *y) {
    for (int m = 0; m < rows; m++)
        norm(x + (size_t)m * d->hidden, weight, d->hidden, d->epsilon, y + (size_t)m * d->hidden);
}

/* Where a row's keys and values lie. */
typedef struct {
    int slot, position;
} Place;

INLINE Place place_of(const Pass *pass, int m) {
    const Place place = {(pass->first + m) / pass->width, (int)pass->positions[m]};
    return place;
}

/* A head's numbers turned by what belongs to their position. */
static void turn(float *x, const Pass *pass, Place place, int size) {
    const int last = pass->turns - 1;
    const size_t at = (size_t)(place.position < last ? place.position : last) * size;
    rotate(x, pass->cos + at, pass->sin + at, size);
}

static void embed(const Decoder *d, int64_t token, float *y) {
    const size_t from = (size_t)token * d->hidden;
    if (d->embedding_type == EMBEDDED_FLOAT32) {
        memcpy(y, (const float *)d->embedding + from, sizeof(float) * d->hidden);
        return;
    }
    const uint16_t *x = (const uint16_t *)d->embedding + from;
    for (int i = 0; i < d->hidden; i += 16) {
        /* A part of a vector is read as a whole one. */
        const int some = d->hidden - i < 16 ? d->hidden - i : 16;
        uint16_t narrow[16] = {0};
        memcpy(narrow, x + i, sizeof *x * some);
        const Wide wide = d->embedding_type == EMBEDDED_HALF
                              ? from_halves((const uint8_t *)narrow)
                              : from_bfloat16(narrow);
        memcpy(y + i, &wide, sizeof(float) * some);
    }
}

/* What a head's first layer is given, [rows, 2 * hidden]; the first thread begins the stream. */
static void join_rows(const Decoder *d, const Pass *pass, int thread, float *y) {
    const int hidden = d->hidden;
    for (int m = 0; m < pass->rows; m++, y += 2 * hidden) {
        const float *state = pass->states + (size_t)m * hidden;
        embed(d, pass->tokens[m], y);
        norm(y, d->token_norm, hidden, d->epsilon, y);
        norm(state, d->state_norm, hidden, d->epsilon, y + hidden);
        if (thread == 0)
            memcpy(pass->x + (size_t)m * hidden, d->residual_normed ? y + hidden : state,
                   sizeof(float) * hidden);
    }
}

/* The stream where it is wanted, as it is before layer `l`. */
static void show(const Pass *pass, int l, int hidden) {
    if (!pass->streams || !pass->streams[l]) return;
    for (int m = 0; m < pass->rows; m++)
        memcpy(pass->streams[l] + (size_t)m * pass->stream_width, pass->x + (size_t)m * hidden,
               sizeof(float) * hidden);
}

/* A thread's share of the queries of a layer, whose first slot is `slots`. They are counted through
 * a key's head after the other, so that those that read the same keys come together. */
static void attend_part(const Decoder *d, const Layer *layer, const Cache *cache, const Pass *pass,
                        const Room *room, size_t slots, int thread, int threads, float *scores) {
    const int rows = pass->rows, size = d->head_size, shared = d->heads / d->kv_heads;
    const int64_t all_queries = (int64_t)rows * d->heads;
    const int64_t end = all_queries * (thread + 1) / threads;
    Query query[QUERIES];
    int n = 0;
    size_t from = 0;
    for (int64_t i = all_queries * thread / threads; i < end; i++) {
        const int kv_head = (int)(i / (rows * shared)), of_head = (int)(i % (rows * shared));
        const int m = of_head / shared, head = kv_head * shared + of_head % shared;
        const Place place = place_of(pass, m);
        const size_t its = ((slots + place.slot) * d->kv_heads + kv_head) * cache->capacity * size;
        if (n == QUERIES || (n && its != from)) {
            attend(cache, n, query, from, size, d->attention_scale, scores);
            n = 0;
        }
        from = its;
        const size_t at = ((size_t)m * d->heads + head) * size;
        float *q = room->q + at;
        if (layer->q_norm) norm(q, layer->q_norm, size, d->epsilon, q);
        turn(q, pass, place, size);
        query[n++] = (Query){q, place.position + 1, room->attended + at};
    }
    if (n) attend(cache, n, query, from, size, d->attention_scale, scores);
}

static void pass_of(const Decoder *d, const Cache *cache, const Pass *pass, const Room *room,
                    Meeting *meeting, int thread, int threads) {
    const int rows = pass->rows, size = d->head_size, hidden = d->hidden;
    const size_t plane = (size_t)cache->capacity * size;
    uintptr_t at = room->own + thread * room->own_bytes;
    Own own = cut_own(&at, d, rows, cache->capacity);
    const int joins = pass->states != NULL;
    if (!joins) {
        for (int m = thread; m < rows; m += threads)
            embed(d, pass->tokens[m], pass->x + (size_t)m * hidden);
        meet(meeting, threads);
    }
    for (int l = 0; l < d->layers; l++) {
        const Layer *layer = &d->layer[l];
        const size_t slots = (size_t)l * cache->slots;
        if (l == 0 && joins)
            join_rows(d, pass, thread, own.normed);
        else
            norm_rows(pass->x, layer->input_norm, d, rows, own.normed);
        if (thread == 0) show(pass, l, hidden);
        const int forms = taken_by(&layer->q) | taken_by(&layer->k) | taken_by(&layer->v);
        take_rows(own.normed, rows, layer->q.inputs, forms, &own.in);
        my_part(&layer->q, &own.in, rows, thread, threads, room->q, 0, &layer->k);
        my_part(&layer->k, &own.in, rows, thread, threads, room->k, 0, &layer->v);
        my_part(&layer->v, &own.in, rows, thread, threads, room->v, 0, &layer->o);
        meet(meeting, threads);
        /* A head to a thread, for the keys of neighbouring positions share lines of the cache. */
        for (int head = thread; head < d->kv_heads; head += threads) {
            for (int m = 0; m < rows; m++) {
                const size_t at_row = ((size_t)m * d->kv_heads + head) * size;
                const Place place = place_of(pass, m);
                float *k = room->k + at_row;
                if (layer->k_norm) norm(k, layer->k_norm, size, d->epsilon, k);
                turn(k, pass, place, size);
                const size_t slot = slots + place.slot;
                keep(cache, (slot * d->kv_heads + head) * plane, place.position, size, k,
                     room->v + at_row);
            }
        }
        meet(meeting, threads);
        attend_part(d, layer, cache, pass, room, slots, thread, threads, own.scores);
        meet(meeting, threads);
        take_rows(room->attended, rows, d->heads * size, taken_by(&layer->o), &own.in);
        my_part(&layer->o, &own.in, rows, thread, threads, pass->x, 1, &layer->gate);
        meet(meeting, threads);
        norm_rows(pass->x, layer->post_norm, d, rows, own.normed);
        take_rows(own.normed, rows, hidden, taken_by(&layer->gate) | taken_by(&layer->up),
                  &own.in);
        my_part(&layer->gate, &own.in, rows, thread, threads, room->gate, 0, &layer->up);
        my_part(&layer->up, &own.in, rows, thread, threads, room->up, 0, &layer->down);
        /* Each thread has made both of what it now joins. */
        const Share share = share_of(d->intermediate, thread, threads);
        const int begin = share.from * OUTPUTS;
        const int end = share.to * OUTPUTS < d->intermediate ? share.to * OUTPUTS : d->intermediate;
        for (int m = 0; m < rows; m++) {
            const size_t row = (size_t)m * d->intermediate + begin;
            gate_with(room->gate + row, room->up + row, end - begin);
        }
        meet(meeting, threads);
        take_rows(room->up, rows, d->intermediate, taken_by(&layer->down), &own.in);
        my_part(&layer->down, &own.in, rows, thread, threads, pass->x, 1,
                l + 1 < d->layers ? &layer[1].q : &d->output);
        meet(meeting, threads);
    }
    if (thread == 0) show(pass, d->layers, hidden);
    if (!pass->normed && !pass->logits) return;
    norm_rows(pass->x, d->norm, d, rows, own.normed);
    if (pass->normed && thread == 0)
        memcpy(pass->normed, own.normed, sizeof(float) * rows * hidden);
    if (pass->logits) {
        take_rows(own.normed, rows, hidden, taken_by(&d->output), &own.in);
        my_part(&d->output, &own.in, rows, thread, threads, pass->logits, 0, &d->layer->q);
    }
}

static void pass_all(const Decoder *d, const Cache *cache, const Pass *pass) {
    uintptr_t at = (uintptr_t)pass->scratch;
    const Room room = cut_room(&at, d, pass->rows, pass->threads, cache->capacity);
    Meeting meeting = {0};
#pragma omp parallel num_threads(pass->threads)
    {
        Shapes before;
        borrow_tiles(&before);
        pass_of(d, cache, pass, &room, &meeting, THREAD, THREADS);
        return_tiles(&before);
    }
}

static void multiply_all(const Matrix *w, const float *x, const float *weight, float epsilon,
                         float *y, void *scratch, int32_t rows, int32_t threads) {
    uintptr_t at = (uintptr_t)scratch;
    Inputs in = cut_inputs(&at, rows, w->inputs);
    if (weight) {
        float *normed = cut(&at, sizeof(float) * rows * w->inputs);
        for (int m = 0; m < rows; m++)
            norm(x + (size_t)m * w->inputs, weight, w->inputs, epsilon,
                 normed + (size_t)m * w->inputs);
        x = normed;
    }
    take_rows(x, rows, w->inputs, taken_by(w), &in);
#pragma omp parallel num_threads(threads)
    {
        Shapes before;
        borrow_tiles(&before);
        my_part(w, &in, rows, THREAD, THREADS, y, 0, w);
        return_tiles(&before);
    }
}

const Set SET = {SET_NAME, pass_all, multiply_all};
