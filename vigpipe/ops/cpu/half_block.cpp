// Half a block of vig_study in one call each for forward and backward: its Linear, norm and graph
// convolution folded (folded.cpp), GELU and the second Linear (hidden.cpp), and the second norm with
// the residual (norm.cpp). A micro-batch of few images spends more time on calls than on numbers.
//
//     x, out (images, height * width, 3)    z = gelu(x first + bias) W2^T    out = BN(z) + x
//
// What a norm counts, (3, channels), is appended to a list, (M, 3, channels), whose length is *num.
#include <algorithm>
#include <cstdint>
#include <vector>

// Functions of the files named above.
extern "C" {
void vigpipe_fold_float32(const float*, const float*, const float*, const float*, const float*,
                          double, const float*, const float*, const float*, float*, float*, double*,
                          double*, int64_t, int64_t, int);
void vigpipe_fold_backward_float32(const float*, const float*, const float*, const float*,
                                   const float*, const float*, const float*, double, const float*,
                                   const float*, const double*, float*, float*, float*, float*,
                                   float*, float*, float*, double*, int64_t, int64_t, int);
void vigpipe_features_float32(const float*, const float*, float*, int64_t, int64_t, int64_t, int);
void vigpipe_grid_sum_float32(const float*, float*, int64_t, int64_t, int64_t, int64_t, int);
void vigpipe_hidden_3_float32(const float*, const float*, const float*, const float*, float*,
                              int64_t, int64_t, int);
void vigpipe_hidden_7_float32(const float*, const float*, const float*, const float*, float*,
                              int64_t, int64_t, int);
void vigpipe_hidden_backward_3_float32(const float*, const float*, const float*, const float*,
                                       const float*, float*, float*, float*, float*, int64_t,
                                       int64_t, int);
void vigpipe_hidden_backward_7_float32(const float*, const float*, const float*, const float*,
                                       const float*, float*, float*, float*, float*, int64_t,
                                       int64_t, int);
void vigpipe_norm_float32(const float*, const float*, const float*, double, const float*,
                          const float*, float*, double*, double*, int64_t, int64_t, int64_t, int,
                          int);
void vigpipe_norm_backward_float32(const float*, const float*, double*, double*, const float*,
                                   const float*, double, const float*, float*, float*, float*,
                                   int64_t, int64_t, int64_t, int, int);
void vigpipe_accumulate(const float*, double*, int64_t, int, int);
}

namespace {

constexpr int64_t C = 3, F = 7;

// The parameters, in the order of their tensors in Python; those of the convolution may be null.
struct Weights {
    const float *W1, *b1, *gamma1, *beta1, *rel, *conv_bias, *root, *W2, *b2, *gamma2, *beta2;
};

struct Shape {
    int64_t images, height, width, H;
    int threads, many;  // threads for passes over x, and for the hidden layer
    int64_t rows() const { return images * height * width; }
};

double* append(double* list, int64_t* num, int64_t channels) {
    return list + (*num)++ * C * channels;
}

// The features of the hidden layer, (R, 7): neighbours, nodes and numbers of neighbours.
std::vector<float> features_of(const float* x, const Shape& s) {
    std::vector<float> total(s.rows() * C), features(s.rows() * F);
    vigpipe_grid_sum_float32(x, total.data(), s.images, s.height, s.width, C, s.threads);
    vigpipe_features_float32(total.data(), x, features.data(), s.images, s.height, s.width,
                             s.threads);
    return features;
}

}  // namespace

// kept: first (F, H) and its bias (H). moments: (4, 3), then mean and variance of z, (2, 3).
extern "C" void vigpipe_half_block(const float* x, const Weights* w, double eps1, double eps2,
                                   const float* sample_scale, float* z, float* out, float* kept,
                                   double* moments, double* list1, int64_t* num1, double* list2,
                                   int64_t* num2, const Shape* shape) {
    const Shape& s = *shape;
    const int64_t R = s.rows(), H = s.H;
    const bool has_conv = w->rel;
    float* bias = kept + (has_conv ? F : C) * H;
    vigpipe_fold_float32(x, w->W1, w->b1, w->gamma1, w->beta1, eps1, w->rel, w->conv_bias, w->root,
                         kept, bias, append(list1, num1, H), moments, R, H, s.threads);
    if (has_conv) {
        const std::vector<float> features = features_of(x, s);
        vigpipe_hidden_7_float32(features.data(), kept, bias, w->W2, z, R, H, s.many);
    } else {
        vigpipe_hidden_3_float32(x, kept, bias, w->W2, z, R, H, s.many);
    }
    double *mean = moments + 4 * C, *variance = mean + C;
    vigpipe_norm_float32(z, w->gamma2, w->beta2, eps2, x, sample_scale, out, mean, variance, R, C,
                         sample_scale ? s.images : 1, 0, s.threads);
    double* counted = append(list2, num2, C);
    for (int64_t c = 0; c < C; ++c) {
        counted[c] = static_cast<double>(R);
        counted[C + c] = mean[c] + w->b2[c];
        counted[2 * C + c] = variance[c] * R;
    }
}

// Writes the gradients of W1, b1, gamma1, beta1, the convolution's bias, W2, b2, gamma2 and beta2,
// in this order, to `grads` one after the other; if there are sums, they are also added to these.
// The gradients of rel and root go to d_rel and d_root, or their factors to `factors`. Biases before
// a norm have gradients of 0.
extern "C" void vigpipe_half_block_backward(const float* grad, const float* x, const Weights* w,
                                            double eps1, double eps2, const float* sample_scale,
                                            const float* z, const float* kept, double* moments,
                                            float* dx, float* grads, double* const* sums,
                                            const int* are_first, float* d_rel, float* d_root,
                                            double* factors, const Shape* shape) {
    const Shape& s = *shape;
    const int64_t R = s.rows(), H = s.H;
    const bool has_conv = w->rel;
    const float* bias = kept + (has_conv ? F : C) * H;
    const int64_t sizes[9] = {C * H, H, H, H, has_conv ? H : 0, C * H, C, C, C};
    float* to[9];
    for (int i = 0; i < 9; ++i) to[i] = i ? to[i - 1] + sizes[i - 1] : grads;
    std::fill(to[1], to[1] + H, 0.0f);
    std::fill(to[6], to[6] + C, 0.0f);
    double *mean = moments + 4 * C, *variance = mean + C;
    std::vector<float> dz(R * C), d_total(has_conv ? R * C : 0);
    std::vector<float> d_features(R * (has_conv ? F : C)), d_first((has_conv ? F + 1 : C + 1) * H);
    vigpipe_norm_backward_float32(grad, z, mean, variance, w->gamma2, w->beta2, eps2, sample_scale,
                                  dz.data(), to[7], to[8], R, C, sample_scale ? s.images : 1, 0,
                                  s.threads);
    float* d_bias = has_conv ? to[4] : d_first.data() + C * H;
    if (has_conv) {
        const std::vector<float> features = features_of(x, s);
        vigpipe_hidden_backward_7_float32(dz.data(), features.data(), kept, bias, w->W2,
                                          d_features.data(), d_first.data(), d_bias, to[5], R, H,
                                          s.many);
    } else {
        vigpipe_hidden_backward_3_float32(dz.data(), x, kept, bias, w->W2, d_features.data(),
                                          d_first.data(), d_bias, to[5], R, H, s.many);
    }
    vigpipe_fold_backward_float32(d_first.data(), d_bias, d_features.data(), x, w->W1, w->gamma1,
                                  w->beta1, eps1, w->rel, w->root, moments, dx, d_total.data(),
                                  to[0], to[2], to[3], d_rel, d_root, factors, R, H, s.threads);
    if (has_conv) {
        vigpipe_grid_sum_float32(d_total.data(), dz.data(), s.images, s.height, s.width, C,
                                 s.threads);
        for (int64_t i = 0; i < R * C; ++i) dx[i] += dz[i];
    }
    for (int64_t i = 0; i < R * C; ++i) dx[i] += grad[i];
    for (int i = 0; sums && i < 9; ++i)
        if (sizes[i]) vigpipe_accumulate(to[i], sums[i], sizes[i], are_first[i], 1);
}
