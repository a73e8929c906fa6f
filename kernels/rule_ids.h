/* The element-wise rules of rules.h, each named once: X(name, number of states).
 *
 * Rule numbers follow the order here. They live in one process only and are never stored or sent: names are.
 */
#ifndef KV_RULE_IDS_H
#define KV_RULE_IDS_H

#define KV_RULES(X)         \
    X(sgd, 0)               \
    X(sgd_momentum, 1)      \
    X(nag, 1)               \
    X(adam, 2)              \
    X(adamw, 2)             \
    X(adagrad, 1)           \
    X(adadelta, 2)          \
    X(adamax, 2)            \
    X(nadam, 2)             \
    X(rmsprop, 1)           \
    X(rmsprop_centered, 3)  \
    X(ftrl, 2)              \
    X(ftml, 3)              \
    X(signum, 1)            \
    X(signsgd, 0)           \
    X(sgld, 0)              \
    X(dcasgd, 1)            \
    X(dcasgd_momentum, 2)   \
    X(lamb_moments, 2)      \
    X(lamb_apply, 2)        \
    X(test, 0)

#endif
