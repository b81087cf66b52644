/* Which instruction sets this CPU has. */

#include <string.h>

#include "decoder.h"

extern const Set mtplx_generic;
#if defined(__x86_64__)
extern const Set mtplx_avx2, mtplx_avx512;
#endif

const Set *mtplx_set(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("f16c");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && (!name || !strcmp(name, mtplx_avx512.name))) return &mtplx_avx512;
    if (avx2 && (!name || !strcmp(name, mtplx_avx2.name))) return &mtplx_avx2;
#endif
    return !name || !strcmp(name, mtplx_generic.name) ? &mtplx_generic : NULL;
}
