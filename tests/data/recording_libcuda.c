/* A fake driver for the four calls that run canvasrt's kernels: it prints the arguments that the bindings pass. `FAILS=launch CODE=700` makes one call fail. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;

static int failed(const char *name) {
    const char *which = getenv("FAILS");
    return which && !strcmp(which, name) ? atoi(getenv("CODE")) : 0;
}

static int load(void **to, const char *image, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    printf("load %s %u %u\n", image, n, m);
    *to = (void *)70;
    return failed("load");
}

static int get(void **to, u64 library, const char *name) {
    printf("get %llu %s\n", library, name);
    *to = (void *)71;
    return failed("get");
}

static int set(int which, int value, u64 kernel, int device) {
    printf("set %d %d %llu %d\n", which, value, kernel, device);
    return failed("set");
}

/* Reads the arguments of a kernel: six addresses, a count and a number, then two more addresses. */
static int launch(u64 kernel, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                  unsigned shared, u64 stream, void **given, void **extra) {
    printf("launch %llu grid %u %u %u threads %u %u %u shared %u stream %llu:", kernel, x, y, z, tx, ty, tz, shared, stream);
    for (int n = 0; n < 6; n++) printf(" %llu", *(u64 *)given[n]);
    printf(" %d %g %llu %llu %s\n", *(int *)given[6], *(float *)given[7], *(u64 *)given[8], *(u64 *)given[9],
           extra ? "extra" : "end");
    return failed("launch");
}

int cuGetProcAddress_v2(const char *name, void **to, int version, u64 flags, int *found) {
    *to = !strcmp(name, "cuLibraryLoadData")      ? (void *)load
          : !strcmp(name, "cuLibraryGetKernel")   ? (void *)get
          : !strcmp(name, "cuKernelSetAttribute") ? (void *)set
          : !strcmp(name, "cuLaunchKernel")       ? (void *)launch
                                                  : 0;
    return *to ? 0 : 500;
}
