/* Attention of a few queries over keys and values that are read once for all. */

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
