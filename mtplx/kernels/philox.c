/* The generator of mtplx/randomness.py, Philox4x32-10. */

#include <stdint.h>

enum { ROUNDS = 10 };

/* From a counter of four words and a key of two. */
static void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t left = 0xD2511F53ull * c[0], right = 0xCD9E8D57ull * c[2];
        c[0] = (uint32_t)(right >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)right;
        c[2] = (uint32_t)(left >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)left;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

/* For n counters and keys: `given` is [6, n], the counters' words first, `words` is [4, n]. All are
 * below 2**32. */
void mtplx_philox(const uint64_t *given, uint64_t *words, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t c[4];
        for (int word = 0; word < 4; word++) c[word] = (uint32_t)given[word * n + i];
        philox(c, (uint32_t)given[4 * n + i], (uint32_t)given[5 * n + i]);
        for (int word = 0; word < 4; word++) words[word * n + i] = c[word];
    }
}

/* Numbers in [0, 1) with 53 random bits: `given` is [4, n], seeds and positions of 64 bits, purposes
 * and offsets of 32. */
void mtplx_uniforms(const uint64_t *given, double *u, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t seed = given[i], position = given[n + i];
        uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), (uint32_t)given[2 * n + i],
                         (uint32_t)given[3 * n + i]};
        philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
        u[i] = (double)((uint64_t)(c[0] >> 5) << 26 | c[1] >> 6) * 0x1p-53;
    }
}
