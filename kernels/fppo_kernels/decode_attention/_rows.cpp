// Attention of one token per row over its cache, as eager.py writes it; or of tokens that `spans` gives rows and columns.

namespace {

constexpr int64_t ANY = 0;  // a number of vectors that is not known when this is compiled

// The products of a query of `width` numbers with `seen` keys, as `dots`, and in the room behind them any numbers.
// `PARTS` is the number of vectors of the width, or ANY.
template <int64_t PARTS, typename T, typename Raw>
void multiply(const Raw* query, int64_t groups, const Raw* keys, int64_t seen, int64_t room, int64_t width, T* scores) {
  constexpr int64_t LANES = Vector<T>::lanes;
  const int64_t wide = PARTS == ANY ? (width + LANES - 1) / LANES * LANES : PARTS * LANES;
  std::vector<T> filled(PARTS == ANY ? (groups + LANES) * wide : LANES * wide);
  T *block = filled.data(), *queries = block + LANES * wide;
  if constexpr (PARTS == ANY)
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t d = 0; d < width; ++d) queries[g * wide + d] = widen(query[g * width + d]);
  for (int64_t c = 0; c < room; c += LANES) {  // keys of a few columns are read by all queries of the group
    const bool whole = c + LANES <= seen;
    if (PARTS == ANY || !whole)
      for (int64_t i = 0; i < std::min(LANES, seen - c); ++i)
        for (int64_t d = 0; d < width; ++d) block[i * wide + d] = widen(keys[(c + i) * width + d]);
    for (int64_t g = 0; g < groups; ++g) {
      T* out = scores + g * room + c;
      if constexpr (PARTS == ANY) {
        dots(queries + g * wide, block, wide, wide, out);
      } else if (whole) {
        dots(query + g * width, keys + c * width, width, PARTS * LANES, out);
      } else {
        dots(query + g * width, block, wide, PARTS * LANES, out);
      }
    }
  }
}

// Products to scores, and these to exp(score - largest), 0 behind the `seen` ones; the largest.
template <typename T, typename Raw>
T weigh(T* scores, int64_t seen, int64_t room, const Raw* bias, const T* sink, T scale, T softcap) {
  for (int64_t c = 0; c < room; c += Vector<T>::lanes) store(load<T>(scores + c) * scale, scores + c);
  if (softcap != T(0))
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) scores[c] = softcap * tangent(scores[c] / softcap);
  if (bias != nullptr)
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) scores[c] += widen(bias[c]);
  for (int64_t c = seen; c < room; ++c) scores[c] = -std::numeric_limits<T>::infinity();
  return exponentiate(scores, 0, room, sink);
}

// The sums of `seen` values of `width` numbers, weighed for each query of the group; and those of their weights.
template <int64_t PARTS, typename T, typename Raw>
void mix(const T* weights, int64_t groups, const Raw* values, int64_t seen, int64_t room, int64_t width, T* out,
         T* totals) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  std::fill(out, out + groups * width, T(0));
  std::fill(totals, totals + groups, T(0));
  for (int64_t c = 0; c < seen; c += LANES)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t end = c + LANES < seen ? c + LANES : seen;
      const T* weight = weights + g * room;
      T *sum = out + g * width, total = totals[g];
      if constexpr (PARTS == ANY) {
        for (int64_t i = c; i < end; ++i) {
          total += weight[i];
#pragma omp simd
          for (int64_t d = 0; d < width; ++d) sum[d] += weight[i] * widen(values[i * width + d]);
        }
      } else {
        vector whole[PARTS];
        for (int64_t j = 0; j < PARTS; ++j) whole[j] = load<T>(sum + j * LANES);
        for (int64_t i = c; i < end; ++i) {
          total += weight[i];
          for (int64_t j = 0; j < PARTS; ++j) whole[j] += weight[i] * load<T>(values + i * width + j * LANES);
        }
        for (int64_t j = 0; j < PARTS; ++j) store(whole[j], sum + j * LANES);
      }
      totals[g] = total;
    }
}

// One of the functions above for a width: those of 32, 64 and 128 numbers stay in registers.
#define FOR_WIDTH(NAME, WIDTH)                          \
  (WIDTH == 32    ? NAME<32 / Vector<T>::lanes, T, Raw> \
   : WIDTH == 64  ? NAME<64 / Vector<T>::lanes, T, Raw> \
   : WIDTH == 128 ? NAME<128 / Vector<T>::lanes, T, Raw> \
                  : NAME<ANY, T, Raw>)

template <typename T, typename Raw>
void attend(const Raw* query, const Raw* keys, const Raw* values, const Raw* bias, const T* sinks,
            const int64_t* spans, Raw* out, int64_t tokens, int64_t heads, int64_t groups, int64_t columns,
            int64_t width, int64_t value_width, int64_t start, int64_t end, T scale, T softcap, int64_t threads) {
  constexpr int64_t LANES = Vector<T>::lanes;
  const int64_t most = (end - start + LANES - 1) / LANES * LANES;
  const auto of_keys = FOR_WIDTH(multiply, width);
  const auto of_values = FOR_WIDTH(mix, value_width);
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> scores(groups * most), sums(groups * value_width), largest(groups), totals(groups);
#pragma omp for
    for (int64_t task = 0; task < tokens * heads; ++task) {
      const int64_t token = task / heads, head = task % heads;
      const int64_t row = spans == nullptr ? token : spans[3 * token];
      const int64_t begin = spans == nullptr ? start : spans[3 * token + 1];
      const int64_t seen = (spans == nullptr ? end : spans[3 * token + 2]) - begin;
      const int64_t room = (seen + LANES - 1) / LANES * LANES;
      const int64_t first = (row * heads + head) * columns + begin;
      const T* sink = sinks == nullptr ? nullptr : sinks + head * groups;
      const Raw* hidden = bias == nullptr ? nullptr : bias + row * columns + begin;
      of_keys(query + task * groups * width, groups, keys + first * width, seen, room, width, scores.data());
      for (int64_t g = 0; g < groups; ++g)
        largest[g] =
            weigh(scores.data() + g * room, seen, room, hidden, sink == nullptr ? nullptr : sink + g, scale, softcap);
      const Raw* own = values + first * value_width;
      of_values(scores.data(), groups, own, seen, room, value_width, sums.data(), totals.data());
      for (int64_t g = 0; g < groups; ++g) {
        const T share = 1 / denominator(totals[g], largest[g], sink == nullptr ? nullptr : sink + g);
        Raw* to = out + (task * groups + g) * value_width;
        for (int64_t d = 0; d < value_width; ++d) narrow(sums[g * value_width + d] * share, to + d);
      }
    }
  }
}

// Turns the queries and keys of `heads` [tokens, queries + 2 keys, width] to each token's position, its column -
// starts[row] in the tables of cosines and sines, as rotary/_heads.cpp does; `turned` gets the queries, the columns of the
// cache the keys and the values. A token of each row goes to `column`, one with a span to the last column of its span.
template <typename T, typename Raw>
void turn_and_put(const Raw* heads, const Raw* cos, const Raw* sin, const int64_t* starts, const int64_t* spans,
                  Raw* turned, Raw* keys, Raw* values, int64_t tokens, int64_t queries, int64_t kv_heads,
                  int64_t columns, int64_t width, int64_t column, int64_t threads) {
  const int64_t half = width / 2, count = queries + 2 * kv_heads;
#pragma omp parallel for num_threads(threads)
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t row = spans == nullptr ? token : spans[3 * token];
    const int64_t place = spans == nullptr ? column : spans[3 * token + 2] - 1;
    const Raw *c = cos + (place - starts[row]) * width, *s = sin + (place - starts[row]) * width;
    for (int64_t head = 0; head < count; ++head) {
      const Raw* x = heads + (token * count + head) * width;
      const int64_t own = (row * kv_heads + (head - queries) % kv_heads) * columns + place;
      if (head >= queries + kv_heads) {
        std::copy(x, x + width, values + own * width);
        continue;
      }
      Raw* out = head < queries ? turned + (token * queries + head) * width : keys + own * width;
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const T a = widen(x[j]), b = widen(x[half + j]), cosine = widen(c[j]), sine = widen(s[j]);
        narrow(a * cosine - b * sine, out + j);
        narrow(b * cosine + a * sine, out + half + j);
      }
    }
  }
}

}  // namespace

#define FUNCTIONS(NAME, T, RAW)                                                                                        \
  extern "C" void attend_##NAME(const RAW* query, const RAW* keys, const RAW* values, const RAW* bias, const T* sinks, \
                                const int64_t* spans, RAW* out, int64_t tokens, int64_t heads, int64_t groups,         \
                                int64_t columns, int64_t width, int64_t value_width, int64_t start, int64_t end,       \
                                double scale, double softcap, int64_t threads) {                                       \
    attend<T>(query, keys, values, bias, sinks, spans, out, tokens, heads, groups, columns, width, value_width, start, \
              end, T(scale), T(softcap), threads);                                                                     \
  }                                                                                                                    \
  extern "C" void step_##NAME(const RAW* heads, const RAW* cos, const RAW* sin, const int64_t* starts,                 \
                              const int64_t* spans, RAW* keys, RAW* values, const RAW* bias, const T* sinks,           \
                              RAW* turned, RAW* out, int64_t tokens, int64_t kv_heads, int64_t groups,                 \
                              int64_t columns, int64_t width, int64_t start, int64_t column, double scale,             \
                              double softcap, int64_t threads) {                                                       \
    turn_and_put<T>(heads, cos, sin, starts, spans, turned, keys, values, tokens, kv_heads * groups, kv_heads,         \
                    columns, width, column, threads);                                                                  \
    attend<T>(turned, keys, values, bias, sinks, spans, out, tokens, kv_heads, groups, columns, width, width, start,   \
              column + 1, T(scale), T(softcap), threads);                                                              \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
