/* Which instruction sets this CPU has. */

#if defined(__linux__)
#define _GNU_SOURCE /* syscall */
#endif
#include <string.h>

#include "decoder.h"

extern const Set mtplx_generic;
#if defined(__x86_64__)
extern const Set mtplx_avx2, mtplx_avx512;
#endif

#if defined(MTPLX_WITH_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

extern const Set mtplx_amx;

/* Whether this CPU has tiles, beside AVX-512, and Linux lets this process use them: their registers
 * are so large that it wants to be asked. */
static int has_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return 0; /* AVX512_BF16 */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0; /* AMX-BF16, AMX-TILE */
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

const Set *mtplx_set(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("f16c");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#if defined(MTPLX_WITH_AMX)
    if (avx512 && (!name || !strcmp(name, mtplx_amx.name)) && has_tiles()) return &mtplx_amx;
#endif
    if (avx512 && (!name || !strcmp(name, mtplx_avx512.name))) return &mtplx_avx512;
    if (avx2 && (!name || !strcmp(name, mtplx_avx2.name))) return &mtplx_avx2;
#endif
    return !name || !strcmp(name, mtplx_generic.name) ? &mtplx_generic : NULL;
}
