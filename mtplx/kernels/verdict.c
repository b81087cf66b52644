/* What becomes of a draft: mtplx/verification.py's `draw`, and its rules that reject, for rows whose
 * filters leave few tokens. Distributions are rows of probabilities beside the tokens they are of,
 * ascending; a row with fewer tokens than others ends in probabilities of 0. */

#include <math.h>
#include <stdint.h>

typedef struct {
    const float *p;
    const int64_t *tokens;
    int32_t width;
} Row;

static Row row_of(const float *p, const int64_t *tokens, int32_t width, int64_t at) {
    const Row row = {p + at * width, tokens + at * width, width};
    return row;
}

static double probability_of(Row row, int64_t token) {
    for (int32_t i = 0; i < row.width; i++)
        if (row.tokens[i] == token) return row.p[i];
    return 0;
}

/* Over the columns of max(weight * p - q, 0), both rows read from front to back. */
typedef struct {
    Row p, q;
    double weight;
    int32_t at_q;
} Residual;

static double residual_at(Residual *r, int32_t i) {
    const int64_t token = r->p.tokens[i];
    while (r->at_q < r->q.width && r->q.tokens[r->at_q] < token) r->at_q++;
    const int found = r->at_q < r->q.width && r->q.tokens[r->at_q] == token;
    const double left = r->p.p[i] * r->weight - (found ? r->q.p[r->at_q] : 0);
    return left > 0 ? left : 0;
}

static double residual_sum(Residual r) {
    double sum = 0;
    for (int32_t i = 0; i < r.p.width; i++) sum += residual_at(&r, i);
    return sum;
}

/* The first column whose cumulative sum is above u times the whole: never one of weight 0. */
static int64_t drawn_from_residual(Residual r, double sum, double u) {
    double up_to = 0;
    for (int32_t i = 0; i < r.p.width; i++) {
        up_to += residual_at(&r, i);
        if (up_to > u * sum) return r.p.tokens[i];
    }
    return r.p.tokens[r.p.width - 1]; /* not reached, as u is below 1 */
}

static int32_t drawn_column(Row row, double u) {
    double sum = 0, up_to = 0;
    for (int32_t i = 0; i < row.width; i++) sum += row.p[i];
    for (int32_t i = 0; i < row.width; i++) {
        up_to += row.p[i];
        if (up_to > u * sum) return i;
    }
    return row.width - 1; /* not reached, as u is below 1 */
}

/* A token of each row [rows, width] by its uniform; these lie `stride` apart. */
void mtplx_draw(const float *p, const int64_t *tokens, const double *u, int64_t *token,
                int32_t rows, int32_t width, int32_t stride) {
    for (int32_t row = 0; row < rows; row++) {
        const Row own = row_of(p, tokens, width, row);
        token[row] = own.tokens[drawn_column(own, u[(int64_t)row * stride])];
    }
}

/* 0 / 0 is `otherwise`. */
static double quotient(double a, double b, double otherwise) { return b > 0 ? a / b : otherwise; }

static double ratio(double p, double q) { return quotient(p, p > q ? p : q, 0); }

/* Keeps a prefix of each row's draft and chooses the token after it, by the block rule or else token
 * by token.
 *
 *   p, p_tokens      the target [batch, depth + 1, p_width]
 *   q, q_tokens      the drafter [batch, depth, q_width]
 *   drafted, depths  tokens [batch, depth], of which the first so many count [batch]
 *   accept, emit     uniforms of each row, `accept_stride` and `emit_stride` apart
 *   block            [batch]
 *   kept, token, probability  the verdict [batch], [batch], [batch, depth]
 *   weights          room for 3 * (depth + 1) numbers
 */
void mtplx_verify(const float *p, const int64_t *p_tokens, const float *q, const int64_t *q_tokens,
                  const int64_t *drafted, const int64_t *depths, const double *accept,
                  const double *emit, const uint8_t *block, int64_t *kept, int64_t *token,
                  float *probability, double *weights, int32_t batch, int32_t depth,
                  int32_t p_width, int32_t q_width, int32_t accept_stride, int32_t emit_stride) {
    double *weight = weights, *trial = weight + depth + 1, *at_least = trial + depth + 1;
    for (int32_t b = 0; b < batch; b++) {
        const int64_t first = (int64_t)b * depth, target = (int64_t)b * (depth + 1);
        const int64_t own = depths[b];
        const double *u = accept + (int64_t)b * accept_stride;
        int64_t count = 0;
        /* How much more of the target than of the drafter is behind a prefix; always all of it where
         * tokens are decided one by one. */
        weight[0] = 1;
        for (int32_t i = 0; i < depth; i++) {
            const int64_t it = drafted[first + i];
            const double of_p = probability_of(row_of(p, p_tokens, p_width, target + i), it);
            const double of_q = probability_of(row_of(q, q_tokens, q_width, first + i), it);
            trial[i] = ratio(weight[i] * of_p, of_q);
            weight[i + 1] = block[b] ? trial[i] : 1;
        }
        if (block[b]) {
            for (int32_t i = 0; i < depth; i++) {
                if (i + 1 != own && i + 1 < depth) {
                    /* What is left to be drawn behind a prefix that another drafted token follows. At
                     * full weight 0 / 0 means p = q comes next: something later is kept for sure. */
                    const Residual r = {row_of(p, p_tokens, p_width, target + i + 1),
                                        row_of(q, q_tokens, q_width, first + i + 1),
                                        weight[i + 1], 0};
                    const double left = residual_sum(r);
                    trial[i] = quotient(left, left + (1 - weight[i + 1]), 1);
                }
                if (i >= own) trial[i] = 0;
                if (u[i] < trial[i]) count = i + 1;
            }
            /* That a prefix of so many is kept: not all trials from there on fail. */
            double fail = 1;
            for (int32_t i = depth - 1; i >= 0; i--) {
                fail *= 1 - trial[i];
                at_least[i + 1] = 1 - fail;
            }
            at_least[0] = 1;
            for (int32_t i = 0; i < depth; i++)
                probability[first + i] = (float)quotient(at_least[i + 1], at_least[i], 0);
        } else {
            while (count < own && u[count] < trial[count]) count++;
            for (int32_t i = 0; i < depth; i++) probability[first + i] = (float)trial[i];
        }
        const Row last = row_of(p, p_tokens, p_width, target + count);
        const double decides = emit[(int64_t)b * emit_stride + count];
        kept[b] = count;
        if (count < own) {
            const Residual r = {last, row_of(q, q_tokens, q_width, first + count), weight[count], 0};
            const double left = residual_sum(r);
            /* Nothing left means p = q up to rounding, where the target itself is the answer. */
            if (left > 0) {
                token[b] = drawn_from_residual(r, left, decides);
                continue;
            }
        }
        token[b] = last.tokens[drawn_column(last, decides)];
    }
}
