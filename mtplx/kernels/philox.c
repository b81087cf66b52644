/* The generator of mtplx/randomness.py. */

#include <stdint.h>

enum { ROUNDS = 10 };

/* Philox4x32-10 for n counters of four words and keys of two: `given` is [6, n], the counters' words
 * first, `words` is [4, n]. All are below 2**32. */
void mtplx_philox(const uint64_t *given, uint64_t *words, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t c0 = (uint32_t)given[i], c1 = (uint32_t)given[n + i];
        uint32_t c2 = (uint32_t)given[2 * n + i], c3 = (uint32_t)given[3 * n + i];
        uint32_t k0 = (uint32_t)given[4 * n + i], k1 = (uint32_t)given[5 * n + i];
        for (int round = 0; round < ROUNDS; round++) {
            const uint64_t left = 0xD2511F53ull * c0, right = 0xCD9E8D57ull * c2;
            c0 = (uint32_t)(right >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)right;
            c2 = (uint32_t)(left >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)left;
            k0 += 0x9E3779B9;
            k1 += 0xBB67AE85;
        }
        words[i] = c0;
        words[n + i] = c1;
        words[2 * n + i] = c2;
        words[3 * n + i] = c3;
    }
}
