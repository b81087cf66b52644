/* For x86 with AVX-512 and its multiplications of bytes (VNNI). */

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif
#include <immintrin.h>

#define MTPLX_AVX512
#define SET_NAME "avx512"
#define SET mtplx_avx512
#include "decoder_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
