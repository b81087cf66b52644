/* Numbers in vectors, for the instruction set whose file includes this. */

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
