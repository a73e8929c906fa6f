/* What the memory of this machine allows: the bare loops behind each claim, in C with OpenMP and nothing around them.
 *
 * Built by the bench with `cc -O3 -march=native -fopenmp`. float32; n is a multiple of 16. `nt` picks streaming stores.
 */
#include <immintrin.h>
#include <stddef.h>

#if defined(__AVX512F__)
#define W 16
typedef __m512 vec;
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define STREAM(p, v) (((size_t)(p) & 63) ? _mm512_storeu_ps(p, v) : _mm512_stream_ps(p, v))
#define ADD _mm512_add_ps
#else
#define W 8
typedef __m256 vec;
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define STREAM(p, v) (((size_t)(p) & 31) ? _mm256_storeu_ps(p, v) : _mm256_stream_ps(p, v))
#define ADD _mm256_add_ps
#endif

float read_sum(const float *a, ptrdiff_t n, int threads)
{
    float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
    for (ptrdiff_t c = 0; c < n / 4096; c++) {
        vec s[4];
        for (int j = 0; j < 4; j++)
            s[j] = LOAD(a + c * 4096 + j * W);
        for (ptrdiff_t i = 4 * W; i < 4096; i += 4 * W)
            for (int j = 0; j < 4; j++)
                s[j] = ADD(s[j], LOAD(a + c * 4096 + i + j * W));
        float out[W];
        STORE(out, ADD(ADD(s[0], s[1]), ADD(s[2], s[3])));
        total += out[0];
    }
    return total;
}

void write_fill(float *a, ptrdiff_t n, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (ptrdiff_t i = 0; i < n; i += W)
        STREAM(a + i, LOAD((float[16]){0}));
}

/* Every one of m outs = the sum of k values. */
void fused(const float *const *src, int k, float *const *out, int m, ptrdiff_t n, int nt, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (ptrdiff_t i = 0; i < n; i += W) {
        vec s = LOAD(src[0] + i);
        for (int j = 1; j < k; j++)
            s = ADD(s, LOAD(src[j] + i));
        for (int j = 0; j < m; j++)
            if (nt)
                STREAM(out[j] + i, s);
            else
                STORE(out[j] + i, s);
    }
#pragma omp parallel num_threads(threads)
    _mm_sfence();
}

/* Momentum SGD on the sum of k gradients; m outs receive the weight. */
void fused_sgd_momentum(const float *const *src, int k, float *w, float *v, float *const *out, int m, ptrdiff_t n, int nt,
                        float lr, float mu, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (ptrdiff_t i = 0; i < n; i += W) {
        float g[W], ww[W];
        vec s = LOAD(src[0] + i);
        for (int j = 1; j < k; j++)
            s = ADD(s, LOAD(src[j] + i));
        STORE(g, s);
        for (int j = 0; j < W; j++) {
            v[i + j] = mu * v[i + j] - lr * g[j];
            w[i + j] += v[i + j];
            ww[j] = w[i + j];
        }
        for (int j = 0; j < m; j++)
            if (nt)
                STREAM(out[j] + i, LOAD(ww));
            else
                STORE(out[j] + i, LOAD(ww));
    }
#pragma omp parallel num_threads(threads)
    _mm_sfence();
}
