/* Optimizer rules, element by element. A template: the includer defines REAL (float or double), FN(name), SQRT(x)
 * and FABS(x), and includes this file once for each REAL and each instruction-set level, after isa.h.
 *
 *   n   contiguous elements          at  index of the first one in its tensor
 *   w   weight, read and written     g   summed raw gradient; rescaling, clipping and decay happen here
 *   s   the rule's states            p   parameters, rounded to REAL once
 *
 * The first four parameters are the same everywhere: learning rate (multiplied by the key's multiplier, and
 * bias-corrected where the rule says so), weight decay, rescale_grad, and the clip bound (INFINITY: no clipping).
 * The further parameters are listed at each rule.
 *
 * Formulas are those of the Python optimizers of MXNet's master branch, in their order of operations. Where MXNet
 * forms 1 - beta in the precision of the weight it is REAL arithmetic here; where it does so in Python the
 * difference is taken in double and then rounded. tests/support/rule_reference.py states each rule again in
 * NumPy; the tests hold both texts together.
 *
 * Loops are free of branches, so that compilers vectorise them. Comparisons are written so that NaN stays NaN.
 */

#ifndef KV_RULES
/* The rules, each named once: X(name, number of states, number of parameters after the first four).
 *
 * Rule numbers follow the order here. They are valid within one process only and are never stored or sent: names are.
 */
#define KV_RULES(X)           \
    X(sgd, 0, 0)              \
    X(sgd_momentum, 1, 1)     \
    X(nag, 1, 1)              \
    X(adam, 2, 3)             \
    X(adamw, 2, 3)            \
    X(adagrad, 1, 1)          \
    X(adadelta, 2, 2)         \
    X(adamax, 2, 3)           \
    X(nadam, 2, 8)            \
    X(rmsprop, 1, 3)          \
    X(rmsprop_centered, 3, 4) \
    X(ftrl, 2, 2)             \
    X(ftml, 3, 5)             \
    X(signum, 1, 2)           \
    X(signsgd, 0, 0)          \
    X(sgld, 0, 4)             \
    X(dcasgd, 1, 1)           \
    X(dcasgd_momentum, 2, 2)  \
    X(lamb_moments, 2, 5)     \
    X(lamb_apply, 2, 5)       \
    X(test, 0, 0)

#define KV_FITS(name, states, params) \
    _Static_assert((states) <= KV_MAX_STATES && 4 + (params) <= KV_MAX_PARAMS, #name);
KV_RULES(KV_FITS)
#undef KV_FITS
#endif

#define KV_COMMON                                                                    \
    const REAL lr = (REAL)p[0], wd = (REAL)p[1], rescale = (REAL)p[2], clip = (REAL)p[3]; \
    (void)lr, (void)wd, (void)rescale, (void)clip, (void)at, (void)w, (void)g, (void)s
#define KV_EACH KV_SIMD for (ptrdiff_t i = 0; i < n; i++)
#define KV_RULE(name)                                                                         \
    static void FN(rule_##name)(ptrdiff_t n, ptrdiff_t at, REAL *restrict w, const REAL *restrict g, \
                                REAL *const *s, const double *p)

KV_INLINE REAL FN(bounded)(REAL x, REAL bound)
{
    x = x > bound ? bound : x;
    return x < -bound ? -bound : x;
}

/* The gradient as most rules need it: rescaled, clipped, then the weight decay added. */
KV_INLINE REAL FN(decayed)(REAL g, REAL w, REAL rescale, REAL clip, REAL wd)
{
    return FN(bounded)(rescale * g, clip) + wd * w;
}

/* -1, 0 or 1; NaN for NaN. */
KV_INLINE REAL FN(sign)(REAL x)
{
    REAL s = x > 0 ? (REAL)1 : x;
    return x < 0 ? (REAL)-1 : s;
}

KV_RULE(sgd)
{
    KV_COMMON;
    KV_EACH
        w[i] -= lr * FN(decayed)(g[i], w[i], rescale, clip, wd);
}

/* p[4] momentum; state: momentum */
KV_RULE(sgd_momentum)
{
    KV_COMMON;
    const REAL mu = (REAL)p[4];
    REAL *restrict m = s[0];
    KV_EACH {
        m[i] = mu * m[i] - lr * FN(decayed)(g[i], w[i], rescale, clip, wd);
        w[i] += m[i];
    }
}

/* p[4] momentum; state: momentum. Nesterov's step, looking ahead from the new momentum. */
KV_RULE(nag)
{
    KV_COMMON;
    const REAL mu = (REAL)p[4];
    REAL *restrict m = s[0];
    KV_EACH {
        const REAL step = lr * FN(decayed)(g[i], w[i], rescale, clip, wd);
        m[i] = mu * m[i] - step;
        w[i] += mu * m[i] - step;
    }
}

/* p[0] lr * sqrt(1 - beta2^t) / (1 - beta1^t); p[4..6] beta1, beta2, epsilon; states: mean, variance.
 * Kingma and Ba, arXiv:1412.6980, with epsilon outside the correction as in the text before its section 2.1. */
KV_RULE(adam)
{
    KV_COMMON;
    const REAL b1 = (REAL)p[4], b2 = (REAL)p[5], eps = (REAL)p[6], c1 = (REAL)1 - b1, c2 = (REAL)1 - b2;
    REAL *restrict m = s[0], *restrict v = s[1];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        m[i] = b1 * m[i] + c1 * x;
        v[i] = b2 * v[i] + c2 * (x * x);
        w[i] -= lr * m[i] / (SQRT(v[i]) + eps);
    }
}

/* As adam, with the decay outside the step and not inside the moments. Loshchilov and Hutter, arXiv:1711.05101. */
KV_RULE(adamw)
{
    KV_COMMON;
    const REAL b1 = (REAL)p[4], b2 = (REAL)p[5], eps = (REAL)p[6], c1 = (REAL)1 - b1, c2 = (REAL)1 - b2;
    REAL *restrict m = s[0], *restrict v = s[1];
    KV_EACH {
        const REAL x = FN(bounded)(rescale * g[i], clip);
        m[i] = b1 * m[i] + c1 * x;
        v[i] = b2 * v[i] + c2 * (x * x);
        w[i] -= lr * (m[i] / (SQRT(v[i]) + eps) + wd * w[i]);
    }
}

/* p[4] epsilon; state: sum of squares. Duchi, Hazan and Singer, JMLR 12 (2011). */
KV_RULE(adagrad)
{
    KV_COMMON;
    const REAL eps = (REAL)p[4];
    REAL *restrict h = s[0];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        h[i] += x * x;
        w[i] -= lr * (x / (SQRT(h[i]) + eps));
    }
}

/* p[4..5] rho, epsilon; states: mean square of the gradient, and of the steps. Zeiler, arXiv:1212.5701. */
KV_RULE(adadelta)
{
    KV_COMMON;
    const REAL rho = (REAL)p[4], eps = (REAL)p[5], c = (REAL)(1.0 - p[4]);
    REAL *restrict a = s[0], *restrict b = s[1];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        a[i] = rho * a[i] + c * (x * x);
        const REAL step = SQRT(b[i] + eps) / SQRT(a[i] + eps) * x;
        b[i] = rho * b[i] + c * (step * step);
        w[i] -= lr * step;
    }
}

/* p[0] lr / (1 - beta1^t); p[4..6] beta1, beta2, epsilon; states: mean, largest magnitude.
 * Kingma and Ba, arXiv:1412.6980, section 7.1. */
KV_RULE(adamax)
{
    KV_COMMON;
    const REAL b1 = (REAL)p[4], b2 = (REAL)p[5], eps = (REAL)p[6], c1 = (REAL)(1.0 - p[4]);
    REAL *restrict m = s[0], *restrict u = s[1];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        const REAL size = FABS(x), faded = b2 * u[i];
        m[i] = b1 * m[i] + c1 * x;
        u[i] = faded >= size ? faded : size;
        w[i] -= lr * (m[i] / (u[i] + eps));
    }
}

/* p[4..6] beta1, beta2, epsilon; p[7..8] momentum of this step and of the next; p[9..11] corrections of the
 * gradient, the mean and the variance; states: mean, variance. Dozat, ICLR 2016 workshop. */
KV_RULE(nadam)
{
    KV_COMMON;
    const REAL b1 = (REAL)p[4], b2 = (REAL)p[5], eps = (REAL)p[6];
    const REAL c1 = (REAL)(1.0 - p[4]), c2 = (REAL)(1.0 - p[5]);
    const REAL now = (REAL)(1.0 - p[7]), next = (REAL)p[8];
    const REAL fix_g = (REAL)p[9], fix_m = (REAL)p[10], fix_v = (REAL)p[11];
    REAL *restrict m = s[0], *restrict v = s[1];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        m[i] = b1 * m[i] + c1 * x;
        v[i] = b2 * v[i] + c2 * (x * x);
        const REAL mean = next * (m[i] / fix_m) + now * (x / fix_g);
        w[i] -= lr * (mean / (SQRT(v[i] / fix_v) + eps));
    }
}

/* p[4..6] rho, epsilon, bound of the weights; state: mean square. Tieleman and Hinton, Coursera lecture 6.5. */
KV_RULE(rmsprop)
{
    KV_COMMON;
    const REAL rho = (REAL)p[4], eps = (REAL)p[5], bound = (REAL)p[6], c = (REAL)1 - rho;
    REAL *restrict v = s[0];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        v[i] = rho * v[i] + c * (x * x);
        w[i] = FN(bounded)(w[i] - lr * (x / (SQRT(v[i]) + eps)), bound);
    }
}

/* p[4..7] rho, epsilon, bound of the weights, momentum; states: mean, mean square, momentum.
 * Graves, arXiv:1308.0850, equations 38 to 45. */
KV_RULE(rmsprop_centered)
{
    KV_COMMON;
    const REAL rho = (REAL)p[4], eps = (REAL)p[5], bound = (REAL)p[6], mu = (REAL)p[7], c = (REAL)1 - rho;
    REAL *restrict q = s[0], *restrict v = s[1], *restrict m = s[2];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        q[i] = rho * q[i] + c * x;
        v[i] = rho * v[i] + c * (x * x);
        m[i] = mu * m[i] - lr * x / SQRT(v[i] - q[i] * q[i] + eps);
        w[i] = FN(bounded)(w[i] + m[i], bound);
    }
}

/* p[4..5] lamda1, beta; states: z, sum of squares. McMahan and others, KDD 2013, algorithm 1. */
KV_RULE(ftrl)
{
    KV_COMMON;
    const REAL l1 = (REAL)p[4], beta = (REAL)p[5];
    REAL *restrict z = s[0], *restrict h = s[1];
    KV_EACH {
        const REAL x = FN(bounded)(rescale * g[i], clip);
        const REAL before = SQRT(h[i]);
        h[i] += x * x;
        const REAL root = SQRT(h[i]);
        z[i] += x - (root - before) / lr * w[i];
        const REAL step = ((z[i] < 0 ? -l1 : l1) - z[i]) / ((beta + root) / lr + wd);
        w[i] = FABS(z[i]) <= l1 ? (REAL)0 : step;
    }
}

/* p[4..6] beta1, beta2, epsilon; p[7..8] 1 - beta1^t, 1 - beta2^t; states: d, variance, z.
 * Zheng and Kwok, ICML 2017, algorithm 1. */
KV_RULE(ftml)
{
    KV_COMMON;
    const REAL b1 = (REAL)p[4], b2 = (REAL)p[5], eps = (REAL)p[6], c1 = (REAL)1 - b1, c2 = (REAL)1 - b2;
    const REAL scale = (REAL)p[7] / lr, fix_v = (REAL)p[8];
    REAL *restrict d = s[0], *restrict v = s[1], *restrict z = s[2];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        v[i] = b2 * v[i] + c2 * (x * x);
        const REAL dt = scale * (SQRT(v[i] / fix_v) + eps);
        z[i] = b1 * z[i] + c1 * x - (dt - b1 * d[i]) * w[i];
        d[i] = dt;
        w[i] = -z[i] / dt;
    }
}

/* p[4..5] momentum, wd_lh (decay outside the step); state: momentum. Bernstein and others, arXiv:1802.04434. */
KV_RULE(signum)
{
    KV_COMMON;
    const REAL mu = (REAL)p[4], keep = (REAL)1 - lr * (REAL)p[5], c = (REAL)1 - mu;
    REAL *restrict m = s[0];
    KV_EACH {
        m[i] = mu * m[i] - c * FN(decayed)(g[i], w[i], rescale, clip, wd);
        w[i] = keep * w[i] + lr * FN(sign)(m[i]);
    }
}

/* p[1] wd + wd_lh. The sign of the raw gradient: rescaling and clipping do not matter. */
KV_RULE(signsgd)
{
    KV_COMMON;
    const REAL keep = (REAL)1 - lr * wd;
    KV_EACH
        w[i] = keep * w[i] - lr * FN(sign)(g[i]);
}

/* Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011:
 * four random words out of a 128-bit counter and a 64-bit key, without any state. */
KV_INLINE void FN(philox)(const uint32_t counter[4], uint32_t k0, uint32_t k1, uint32_t out[4])
{
    uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
    for (int round = 0; round < 10; round++) {
        const uint64_t x = 0xD2511F53ull * a, y = 0xCD9E8D57ull * c;
        a = (uint32_t)(y >> 32) ^ b ^ k0;
        b = (uint32_t)y;
        c = (uint32_t)(x >> 32) ^ d ^ k1;
        d = (uint32_t)x;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* A standard normal number for one element of one update of one key (Box and Muller 1958). It depends on nothing
 * else: threads and the cut of a tensor do not change it. */
KV_INLINE double FN(normal)(uint64_t element, uint64_t update, uint32_t seed, uint32_t key)
{
    const uint32_t counter[4] = {(uint32_t)element, (uint32_t)(element >> 32), (uint32_t)update,
                                 (uint32_t)(update >> 32)};
    uint32_t r[4];
    FN(philox)(counter, seed, key, r);
    const double u = ((double)(((uint64_t)r[0] << 32 | r[1]) >> 12) + 0.5) * 0x1p-52;
    const double v = ((double)(((uint64_t)r[2] << 32 | r[3]) >> 12) + 0.5) * 0x1p-52;
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

/* p[4..7] seed, hash of the key (32 bits each), update count, place in the tensor of the first element here. Welling
 * and Teh, ICML 2011. */
KV_RULE(sgld)
{
    KV_COMMON;
    const REAL half = lr / 2;
    const double spread = sqrt(p[0]);
    const uint32_t seed = (uint32_t)p[4], key = (uint32_t)p[5];
    const uint64_t first = (uint64_t)p[7] + (uint64_t)at;
    for (ptrdiff_t i = 0; i < n; i++) {
        const double noise = spread * FN(normal)(first + (uint64_t)i, (uint64_t)p[6], seed, key);
        w[i] = w[i] - half * FN(decayed)(g[i], w[i], rescale, clip, wd) + (REAL)noise;
    }
}

/* p[4] lamda; state: weight before the last update. Zheng and others, arXiv:1609.08326. */
KV_RULE(dcasgd)
{
    KV_COMMON;
    const REAL lamda = (REAL)p[4];
    REAL *restrict previous = s[0];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        const REAL step = lr * (x * x * (w[i] - previous[i]) * lamda + x);
        previous[i] = w[i];
        w[i] -= step;
    }
}

/* p[4..5] lamda, momentum; states: momentum, weight before the last update. */
KV_RULE(dcasgd_momentum)
{
    KV_COMMON;
    const REAL lamda = (REAL)p[4], mu = (REAL)p[5];
    REAL *restrict m = s[0], *restrict previous = s[1];
    KV_EACH {
        const REAL x = FN(decayed)(g[i], w[i], rescale, clip, wd);
        m[i] = mu * m[i] - lr * (x * x * (w[i] - previous[i]) * lamda + x);
        previous[i] = w[i];
        w[i] += m[i];
    }
}

/* LAMB (You and others, arXiv:1904.00962) is three steps over a whole tensor: moments, the two norms, and the step.
 * All three take p[4..6] beta1, beta2, epsilon; p[7..8] 1 - beta1^t, 1 - beta2^t (1 without bias correction);
 * states: mean, variance. */
KV_RULE(lamb_moments)
{
    KV_COMMON;
    const REAL b1 = (REAL)p[4], b2 = (REAL)p[5], c1 = (REAL)1 - b1, c2 = (REAL)1 - b2;
    REAL *restrict m = s[0], *restrict v = s[1];
    KV_EACH {
        const REAL x = FN(bounded)(rescale * g[i], clip);
        m[i] = b1 * m[i] + c1 * x;
        v[i] = b2 * v[i] + c2 * (x * x);
    }
}

KV_INLINE REAL FN(lamb_direction)(REAL w, REAL m, REAL v, REAL fix_m, REAL fix_v, REAL eps, REAL wd)
{
    return m / fix_m / (SQRT(v / fix_v) + eps) + wd * w;
}

/* p[0] learning rate times trust ratio; the gradient is not read. */
KV_RULE(lamb_apply)
{
    KV_COMMON;
    const REAL eps = (REAL)p[6], fix_m = (REAL)p[7], fix_v = (REAL)p[8];
    const REAL *restrict m = s[0], *restrict v = s[1];
    KV_EACH
        w[i] -= lr * FN(lamb_direction)(w[i], m[i], v[i], fix_m, fix_v, eps, wd);
}

/* Plain descent for tests, as MXNet's optimizer of that name: no clipping. */
KV_RULE(test)
{
    KV_COMMON;
    KV_EACH
        w[i] -= lr * (rescale * g[i] + wd * w[i]);
}

/* Sums have eight lanes of doubles, element i in lane i % 8, so that their bits do not depend on the level. */
KV_INLINE double FN(lane_total)(const double lane[8])
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* Up to eight elements, one for each lane. */
KV_INLINE void FN(lamb_lanes)(ptrdiff_t lanes, const REAL *w, const REAL *m, const REAL *v, const double *p,
                              double *restrict ww, double *restrict uu)
{
    const REAL wd = (REAL)p[1], eps = (REAL)p[6], fix_m = (REAL)p[7], fix_v = (REAL)p[8];
    for (ptrdiff_t j = 0; j < lanes; j++) {
        const double x = w[j], u = FN(lamb_direction)(w[j], m[j], v[j], fix_m, fix_v, eps, wd);
        ww[j] += x * x;
        uu[j] += u * u;
    }
}

/* Sums of squares of a block of the weight, and of LAMB's direction there. */
static void FN(block_lamb_norms)(ptrdiff_t n, const REAL *w, const REAL *m, const REAL *v, const double *p,
                                 double *w2, double *u2)
{
    double ww[8] = {0}, uu[8] = {0};
    ptrdiff_t i = 0;
    for (; i + 8 <= n; i += 8)
        FN(lamb_lanes)(8, w + i, m + i, v + i, p, ww, uu);
    FN(lamb_lanes)(n - i, w + i, m + i, v + i, p, ww, uu);
    *w2 = FN(lane_total)(ww);
    *u2 = FN(lane_total)(uu);
}

/* AdaGrad with one history for each row; p[4] epsilon. As MXNet's contrib.GroupAdaGrad. */
static void FN(row_group_adagrad)(ptrdiff_t cols, REAL *restrict w, const REAL *restrict g, REAL *restrict h,
                                  const double *p)
{
    const REAL lr = (REAL)p[0], rescale = (REAL)p[2], clip = (REAL)p[3], eps = (REAL)p[4];
    double lane[8] = {0};
    for (ptrdiff_t i = 0; i < cols; i++) {
        const REAL x = FN(bounded)(rescale * g[i], clip);
        lane[i % 8] += (double)(x * x);
    }
    *h += (REAL)(FN(lane_total)(lane) / (double)(cols ? cols : 1));
    const REAL root = SQRT(*h) + eps;
    KV_SIMD
    for (ptrdiff_t i = 0; i < cols; i++)
        w[i] -= lr * (FN(bounded)(rescale * g[i], clip) / root);
}

#undef KV_COMMON
#undef KV_EACH
#undef KV_RULE
