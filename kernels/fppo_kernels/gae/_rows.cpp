// Generalised advantage estimates of rows [rows, length], as scan.py writes them: y_t = ahead_t + decay_t y_{t+1}.

namespace {

constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <typename V>
inline V load(const void* from) {
  V to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

#define LATER(x, y, by)                                                                                               \
  __builtin_shufflevector(x, y, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, by + 8, by + 9, by + 10, \
                          by + 11, by + 12, by + 13, by + 14, by + 15)

struct Row {
  float step, of_value;  // gamma lambda, gamma (1 - lambda)
  Floats carry;                // y after the block

  // LANES tokens, of which those that are not `here` hand on what follows.
  inline void block(const float* rewards, const float* values, const bool* mask, float* advantages, float* returns) {
    const Floats none = {}, ones = none + 1.0f;
    const Bits here = -__builtin_convertvector(load<Bytes>(mask), Bits);
    const Floats reward = (Floats)(load<Bits>(rewards) & here), value = (Floats)(load<Bits>(values) & here);
    Floats y = step * reward + of_value * value;
    Floats decay = (Floats)(((Bits)(none + step) & here) | ((Bits)ones & ~here));
    y += decay * LATER(y, none, 1), decay *= LATER(decay, ones, 1);
    y += decay * LATER(y, none, 2), decay *= LATER(decay, ones, 2);
    y += decay * LATER(y, none, 4), decay *= LATER(decay, ones, 4);
    y += decay * LATER(y, none, 8), decay *= LATER(decay, ones, 8);
    y += decay * carry;
    const Floats result = (Floats)((Bits)(reward + LATER(y, carry, 1)) & here), advantage = result - value;
    carry = none + y[0];
    std::memcpy(returns, &result, sizeof(result));
    std::memcpy(advantages, &advantage, sizeof(advantage));
  }
};

}  // namespace

extern "C" void gae_float64(const double* rewards, const double* values, const bool* mask, double* advantages,
                            double* returns, int64_t rows, int64_t length, double gamma, double lam, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    double carry = 0;
    for (int64_t at = (row + 1) * length - 1; at >= row * length; --at) {
      returns[at] = mask[at] ? rewards[at] + carry : 0;
      advantages[at] = mask[at] ? returns[at] - values[at] : 0;
      if (mask[at]) carry = gamma * lam * returns[at] + gamma * (1 - lam) * values[at];
    }
  }
}

extern "C" void gae_float32(const float* rewards, const float* values, const bool* mask, float* advantages,
                            float* returns, int64_t rows, int64_t length, double gamma, double lam, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    Row state{float(gamma * lam), float(gamma * (1 - lam)), Floats{}};
    const int64_t first = row * length, rest = length % LANES;
    for (int64_t at = first + length - LANES; at >= first; at -= LANES)
      state.block(rewards + at, values + at, mask + at, advantages + at, returns + at);
    if (rest != 0) {
      float in[2][LANES] = {}, out[2][LANES];
      bool here[LANES] = {};
      std::copy_n(rewards + first, rest, in[0]);
      std::copy_n(values + first, rest, in[1]);
      std::copy_n(mask + first, rest, here);
      state.block(in[0], in[1], here, out[0], out[1]);
      std::copy_n(out[0], rest, advantages + first);
      std::copy_n(out[1], rest, returns + first);
    }
  }
}
