/* A decoder's forward pass for a few tokens at a time, on a CPU.
 *
 * Every row of a pass is computed by itself, in an order that does not depend on how many rows
 * there are, which one it is, or how many threads work on them: the same position gives the same
 * bits in a pass of one and in a pass of eight.
 */
#ifndef MTPLX_DECODER_H
#define MTPLX_DECODER_H

#include <stddef.h>
#include <stdint.h>

/* Tiles need a compiler that knows them, and an operating system that is asked for them. */
#if defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define MTPLX_WITH_AMX
#endif

/* How a matrix is stored. Plain numbers as they are, [outputs, inputs] one row after another:
 *
 *   BFLOAT16, FLOAT32
 *
 * Others in tiles of 16 outputs by 32 inputs, one row of tiles after another, so that a pass reads
 * it from front to back. Outputs and inputs are padded with zeros to whole tiles.
 *
 *   FOUR_BITS   256 bytes of numbers 0 to 15, then 16 scales and 16 minima in half precision:
 *               weight = scale * number + minimum
 *   EIGHT_BITS  512 bytes of numbers 0 to 255, then 16 scales: weight = scale * (number - 128)
 *
 * Four inputs of one output lie beside each other, then those of the next output: the order in which
 * CPUs multiply and add bytes.
 */
enum { FOUR_BITS, EIGHT_BITS, BFLOAT16, FLOAT32 };

typedef struct {
    int32_t kind, outputs, inputs; /* without padding */
    const uint8_t *weights;
    const float *bias; /* of the outputs, or NULL */
} Matrix;

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm; /* of the hidden size */
    const float *q_norm, *k_norm;        /* of a head's size, or NULL */
} Layer;

/* `embedding` is [vocabulary, hidden] in one of the types below. A drafter's head, which joins a
 * token with a hidden state, has norms for both, and the state's behind the token's is what its
 * first layer's attention is given; others have NULL there. With `residual_normed` the residual
 * stream begins with the state's norm, without with the state. */
enum { EMBEDDED_FLOAT32, EMBEDDED_BFLOAT16, EMBEDDED_HALF };

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_size, intermediate;
    float epsilon, attention_scale;
    const Layer *layer;
    const float *norm;
    Matrix output;
    int32_t embedding_type, residual_normed;
    const void *embedding;
    const float *token_norm, *state_norm; /* of the hidden size, or NULL */
} Decoder;

/* Values of all layers, bfloat16 or float32, [layers, slots, kv_heads, capacity, head]; keys in
 * blocks of 16 positions, [layers, slots, kv_heads, capacity / 16, head, 16], so that as many are
 * multiplied at a time. The capacity is a multiple of 16. */
typedef struct {
    int32_t narrow; /* bfloat16 */
    int32_t slots, capacity;
    void *keys, *values;
} Cache;

/* Some rows of a pass over `width` positions of each slot: those from the `first` on. A row attends
 * to what lies in its slot up to and with its position.
 *
 * `x` is the residual stream, in the end that after the last layer. Positions from `turns` on are
 * turned as the last one before.
 * `streams[i]` is where the residual stream after i layers is wanted, or NULL; its rows lie
 * `stream_width` numbers apart.
 * `normed` and `logits` may be NULL. `scratch` has room for what `mtplx_room` says. */
typedef struct {
    const int64_t *tokens;    /* [rows] */
    const float *states;      /* [rows, hidden], where tokens are joined with them, else NULL */
    float *x;                 /* [rows, hidden] */
    const float *cos, *sin;   /* [turns, head_size] */
    const int64_t *positions; /* [rows] */
    float *const *streams;    /* [layers + 1] */
    float *normed;            /* [rows, hidden] */
    float *logits;            /* [rows, vocabulary] */
    void *scratch;
    int32_t rows, first, width, threads, turns, stream_width;
} Pass;

/* What there is for one instruction set. */
typedef struct {
    const char *name;
    void (*pass)(const Decoder *, const Cache *, const Pass *);
    /* x [rows, inputs] by a matrix into y [rows, outputs]; normed by these weights before, unless
     * they are NULL. */
    void (*multiply)(const Matrix *, const float *x, const float *norm, float epsilon, float *y,
                     void *scratch, int32_t rows, int32_t threads);
} Set;

/* The set of this name, or the best one for NULL; NULL if this CPU cannot run it. */
const Set *mtplx_set(const char *name);

/* How much scratch memory a pass or a multiplication needs, in bytes. */
size_t mtplx_room(const Decoder *, int32_t rows, int32_t threads, int32_t capacity);
size_t mtplx_room_to_multiply(int32_t rows, int32_t inputs);

#endif
