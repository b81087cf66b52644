/* For x86 with AVX-512 and tiles of bfloat16 (AMX), on Linux. */

#include "decoder.h"

#if defined(MTPLX_WITH_AMX)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c")
#endif
#include <immintrin.h>

#define MTPLX_AVX512
#define MTPLX_AMX
#define SET_NAME "amx"
#define SET mtplx_amx
#include "decoder_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
