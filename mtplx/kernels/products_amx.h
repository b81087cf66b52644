/* Products of bfloat16 by matrix units, where the instruction set has them. */

#if defined(MTPLX_AMX)
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
