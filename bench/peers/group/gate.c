/* The barrier for ctypes; and the update rules, for environments that have no torch. */
#include "gate.h"
#include <math.h>
#include <stddef.h>

int gate_wait(gate *g, unsigned n)
{
    return gate_pass(g, n);
}

void sgd_momentum(float *restrict w, float *restrict v, const float *restrict g, ptrdiff_t n, float lr, float mu, float wd)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        v[i] = mu * v[i] - lr * (g[i] + wd * w[i]);
        w[i] += v[i];
    }
}

/* lr is the learning rate of the step. */
void adam(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, ptrdiff_t n, float lr, float wd,
          float b1, float b2, float eps)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        float d = g[i] + wd * w[i];
        m[i] = b1 * m[i] + (1 - b1) * d;
        v[i] = b2 * v[i] + (1 - b2) * d * d;
        w[i] -= lr * m[i] / (sqrtf(v[i]) + eps);
    }
}
