/* For x86 with AVX2. */

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#define MTPLX_AVX2
#define SET_NAME "avx2"
#define SET mtplx_avx2
#include "decoder_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
