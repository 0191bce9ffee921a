// The Python module: thin calls into Engine, and single kernels for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "engine.h"
#include "probes.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

template <class T> using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

int size(const Vector<const int32_t>& a) { return static_cast<int>(a.shape(0)); }

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

KvKind kv_kind(const std::string& name) {
    require(name == "float32" || name == "bfloat16" || name == "int8", "unknown type of the KV pool");
    return name == "float32" ? KvKind::F32 : name == "bfloat16" ? KvKind::BF16 : KvKind::I8;
}

// `rows` rows of a stored matrix, checked against the bytes that are there. `second` may be empty.
PackJob pack_job(const std::string& stored, const std::string& format, int rows, int columns, Vector<const uint8_t> first,
                 Vector<const uint8_t> second) {
    PackJob job{};
    require(stored_of(stored, &job.stored), "unknown stored type");
    job.format = native_format(job.stored);
    if (!format.empty()) require(format_of(format, &job.format), "unknown format");
    require(job.stored < Stored::Int4, "codes come with their scales");
    bool plain = job.stored == Stored::F32 || (job.stored == Stored::BF16 && job.format == Format::BF16);
    require(plain || job.format == native_format(job.stored), "this stored type cannot be packed in this format");
    int whole = job.stored >= Stored::Q4_K && job.stored <= Stored::Q6_K ? 256 : job.stored < Stored::BF16 ? kBlock : 1;
    require(rows > 0 && columns > 0 && columns % whole == 0, "columns are not whole blocks");
    size_t bytes = stored_row_bytes(job.stored, columns) * static_cast<size_t>(rows);
    require(first.size() == bytes && (second.size() == 0 || second.size() == bytes), "the matrix has a wrong number of bytes");
    int padded = pad_to(columns, kBlock);
    if (job.format == Format::G8) job.group = padded % 128 == 0 ? 128 : padded % 64 == 0 ? 64 : kBlock;
    job.first = first.data();
    job.second = second.size() ? second.data() : nullptr;
    job.rows = rows;
    job.columns = columns;
    return job;
}

// A matrix whose scales lie apart, from its arrays: codes, scales, and zeros or nothing. `second` may be empty.
using Arrays = std::vector<Vector<const uint8_t>>;
PackJob grouped_job(const std::string& stored, int group, int rows, int columns, const Arrays& first, const Arrays& second) {
    PackJob job{};
    require(stored_of(stored, &job.stored) && job.stored >= Stored::Int4, "unknown type of codes");
    require(rows > 0 && columns > 0 && (job.stored == Stored::Int8 || columns % 2 == 0), "columns are not whole bytes");
    require(group > 0 && group % kBlock == 0 && pad_to(columns, kBlock) % group == 0, "columns are not whole groups");
    require(first.size() == 3 && (second.empty() || second.size() == 3), "a matrix is codes, scales and zeros");
    size_t scales = static_cast<size_t>(rows) * static_cast<size_t>(pad_to(columns, kBlock) / group);
    bool zeros = first[2].size() > 0;
    for (const Arrays* matrix : {&first, &second}) {
        if (matrix->empty()) continue;
        const Arrays& a = *matrix;
        require(a[0].size() == stored_row_bytes(job.stored, columns) * static_cast<size_t>(rows) && a[1].size() == 2 * scales &&
                    a[2].size() == (zeros ? scales : 0), "the matrix has a wrong number of bytes");
        (matrix == &first ? job.first : job.second) = a[0].data();
        job.groups[matrix == &second] = {a[1].data(), zeros ? a[2].data() : nullptr};
    }
    job.format = native_format(job.stored, zeros);
    // A scale for each block and no zeros: that is how blocks of these formats lie, whose products are faster then.
    if (group == kBlock && !zeros) job.format = job.stored == Stored::Int4 ? Format::Q4 : Format::Q8;
    job.rows = rows;
    job.columns = columns;
    job.group = group;
    return job;
}

// Rows and their tokens, every number checked against the sizes of the arrays and the pool.
Step make_step(const Engine& e, Vector<const int32_t> ids, Vector<const int32_t> device_rows, Vector<const int32_t> start,
               Vector<const int32_t> length, Vector<const int32_t> sampled, Table<const int32_t> tables) {
    Step s{};
    s.rows = size(device_rows);
    s.tokens = size(ids);
    s.ids = ids.data(), s.device_rows = device_rows.data(), s.start = start.data(), s.length = length.data();
    s.sampled = sampled.data(), s.samples = size(sampled);
    s.tables = tables.data(), s.table_columns = static_cast<int>(tables.shape(1));
    require(size(start) == s.rows && size(length) == s.rows, "rows, starts and lengths differ in number");
    long tokens = 0;
    for (int i = 0; i < s.rows; i++) {
        require(s.length[i] > 0 && s.start[i] >= 0, "a row without tokens");
        require(s.device_rows[i] >= 0 && static_cast<size_t>(s.device_rows[i]) < tables.shape(0), "a device row out of range");
        int blocks = (s.start[i] + s.length[i] - 1) / e.block_size() + 1;
        require(blocks <= s.table_columns, "a row is longer than its table");
        const int32_t* table = s.tables + static_cast<size_t>(s.device_rows[i]) * static_cast<size_t>(s.table_columns);
        for (int b = 0; b < blocks; b++) require(table[b] >= 0 && table[b] < e.blocks(), "a block out of range");
        tokens += s.length[i];
    }
    require(tokens == s.tokens, "lengths do not add up to the tokens");
    for (int i = 0; i < s.tokens; i++) require(s.ids[i] >= 0 && s.ids[i] < e.vocab(), "a token id out of range");
    for (int i = 0; i < s.samples; i++)
        require(s.sampled[i] >= 0 && s.sampled[i] < s.rows && (i == 0 || s.sampled[i] > s.sampled[i - 1]), "bad sampled rows");
    return s;
}

void bind_engine(nb::module_& m) {
    nb::class_<Engine>(m, "Engine")
        .def("__init__",
             [](Engine* self, const std::vector<int>& sizes, const std::vector<float>& factors, bool gelu, bool post_norms,
                const std::vector<std::vector<int>>& layers, const std::vector<float>& frequencies, float magnitude,
                const std::vector<float>& window_frequencies, float window_magnitude, const std::string& kv, int threads,
                const std::string& isa) {
                 require(sizes.size() == 7 && factors.size() == 7 && !layers.empty(), "seven sizes, seven factors, layers");
                 std::vector<LayerDims> dims;
                 for (const std::vector<int>& l : layers) {
                     require(l.size() == 5, "five numbers a layer");
                     dims.push_back({l[0], l[1], l[2], l[3], l[4]});
                 }
                 Dims d = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], factors[0], factors[1], factors[2], factors[3],
                           factors[4], factors[5], factors[6], gelu, post_norms, dims, {frequencies, magnitude},
                           {window_frequencies, window_magnitude}, sizes[5], sizes[6], kv_kind(kv)};
                 new (self) Engine(d, threads, isa);
             },
             nb::arg("sizes"), nb::arg("factors"), nb::arg("gelu"), nb::arg("post_norms"), nb::arg("layers"),
             nb::arg("frequencies"), nb::arg("magnitude"), nb::arg("window_frequencies"), nb::arg("window_magnitude"),
             nb::arg("kv"), nb::arg("threads"), nb::arg("isa"))
        .def("add_matrix",
             [](Engine& e, int layer, const std::string& name, int part, const std::string& stored, const std::string& format,
                int rows, int columns, Vector<const uint8_t> first, Vector<const uint8_t> second, bool mapped) {
                 PackJob job = pack_job(stored, format, rows, columns, first, second);
                 job.mapped = mapped;
                 nb::gil_scoped_release release;
                 e.add_matrix(layer, name, part, job);
             })
        .def("add_grouped",
             [](Engine& e, int layer, const std::string& name, int part, const std::string& stored, int group, int rows, int columns,
                const Arrays& first, const Arrays& second, Vector<const int32_t> order, bool mapped) {
                 PackJob job = grouped_job(stored, group, rows, columns, first, second);
                 job.mapped = mapped;
                 require(order.size() == 0 || size(order) == columns, "the order of the columns has a wrong size");
                 for (int i = 0; i < size(order); i++)
                     require(order.data()[i] >= 0 && order.data()[i] < columns, "a column out of range");
                 nb::gil_scoped_release release;
                 e.add_matrix(layer, name, part, job, order.size() ? order.data() : nullptr);
             })
        .def("add_vector", [](Engine& e, int layer, const std::string& name, int part,
                              Vector<const float> v) { e.add_vector(layer, name, part, v.data(), static_cast<int>(v.size())); })
        .def("ready", &Engine::ready)
        .def("copy_blocks",
             [](Engine& e, Table<const int32_t> pairs) {
                 require(pairs.shape(1) == 2, "pairs of blocks");
                 for (size_t i = 0; i < pairs.size(); i++)
                     require(pairs.data()[i] >= 0 && pairs.data()[i] < e.blocks(), "a block out of range");
                 nb::gil_scoped_release release;
                 e.copy_blocks(pairs.data(), static_cast<int>(pairs.shape(0)));
             })
        .def("step",
             [](Engine& e, Vector<const int32_t> ids, Vector<const int32_t> device_rows, Vector<const int32_t> start,
                Vector<const int32_t> length, Vector<const int32_t> sampled, Table<const int32_t> tables,
                Table<const int32_t> params, Vector<int32_t> tokens, Vector<uint8_t> bad) {
                 Step s = make_step(e, ids, device_rows, start, length, sampled, tables);
                 require(params.shape(0) >= tables.shape(0) && params.shape(1) == kParamWords, "wrong parameter table");
                 require(tokens.size() == sampled.size() && bad.size() == sampled.size(), "wrong size of the results");
                 nb::gil_scoped_release release;
                 e.forward(s);
                 e.head_and_sample(s, params.data(), tokens.data(), bad.data());
             })
        .def("forward",
             [](Engine& e, Vector<const int32_t> ids, Vector<const int32_t> device_rows, Vector<const int32_t> start,
                Vector<const int32_t> length, Vector<const int32_t> sampled, Table<const int32_t> tables) {
                 Step s = make_step(e, ids, device_rows, start, length, sampled, tables);
                 nb::gil_scoped_release release;
                 e.forward(s);
             })
        .def("head",
             [](Engine& e, int first, Table<float> out, Vector<uint8_t> bad) {
                 int n = static_cast<int>(out.shape(0));
                 require(first >= 0 && n <= kChunk && first + n <= e.kept() && static_cast<int>(bad.size()) == n, "rows out of range");
                 require(static_cast<int>(out.shape(1)) == e.padded_vocab(), "wrong width of the logits");
                 nb::gil_scoped_release release;
                 e.head(first, n, out.data(), bad.data());
             })
        .def("sample",
             [](Engine& e, Table<const float> logits, Table<const int32_t> params, Vector<const int32_t> positions,
                Vector<int32_t> tokens) {
                 size_t n = logits.shape(0);
                 require(static_cast<int>(logits.shape(1)) == e.padded_vocab(), "wrong width of the logits");
                 require(params.shape(0) == n && params.shape(1) == kParamWords && positions.size() == n && tokens.size() == n,
                         "wrong number of rows");
                 nb::gil_scoped_release release;
                 e.sample(logits.data(), static_cast<int>(n), params.data(), positions.data(), tokens.data());
             })
        .def("log_sum_exp",
             [](Engine& e, Vector<const float> row) {
                 require(static_cast<int>(row.size()) == e.padded_vocab(), "wrong width of the logits");
                 return e.kernels().log_sum_exp(row.data(), e.vocab());
             })
        .def("count_greater",
             [](Engine& e, Vector<const float> row, float value) {
                 require(static_cast<int>(row.size()) == e.padded_vocab(), "wrong width of the logits");
                 return e.kernels().count_greater(row.data(), e.vocab(), value);
             })
        .def_prop_ro("isa", [](const Engine& e) { return std::string(e.kernels().name); })
        .def_prop_ro("threads", &Engine::threads)
        .def_prop_ro("padded_vocab", &Engine::padded_vocab)
        .def_prop_ro("weight_bytes", &Engine::weight_bytes)
        .def_prop_ro("kv_bytes", &Engine::kv_bytes)
        .def_prop_ro("shared_segments", &Engine::shared_segments)
        .def_prop_ro("calls", &Engine::calls);
}

void bind_probes(nb::module_& m) {
    m.def("kernel_sets", [] {
        std::vector<std::string> names;
        for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"})
            if (find_kernels(name)) names.push_back(name);
        return names;
    });
    m.def("kv_block_bytes", [](const std::string& kv, int head_dim, int kv_heads, int block_size) {
        return kv_shape(kv_kind(kv), head_dim, kv_heads, block_size).block_bytes;
    });
    m.def("product", [](const std::string& isa, const std::string& stored, const std::string& format, int rows, int columns,
                        Vector<const uint8_t> weights, Table<const float> x, Table<float> out) {
        PackJob job = pack_job(stored, format, rows, columns, weights, Vector<const uint8_t>());
        require(static_cast<int>(x.shape(1)) == columns && static_cast<int>(out.shape(1)) == rows && out.shape(0) == x.shape(0),
                "shapes do not fit");
        probe_product(isa, job, x.data(), static_cast<int>(x.shape(0)), out.data());
    });
    m.def("unpack", [](const std::string& stored, const std::string& format, int rows, int columns, Vector<const uint8_t> weights,
                       Table<float> out) {
        PackJob job = pack_job(stored, format, rows, columns, weights, Vector<const uint8_t>());
        require(static_cast<int>(out.shape(0)) == rows && static_cast<int>(out.shape(1)) == columns, "shapes do not fit");
        probe_unpack(job, out.data());
    });
    m.def("product_grouped", [](const std::string& isa, const std::string& stored, int group, int rows, int columns,
                                const Arrays& weights, Table<const float> x, Table<float> out) {
        PackJob job = grouped_job(stored, group, rows, columns, weights, {});
        require(static_cast<int>(x.shape(1)) == columns && static_cast<int>(out.shape(1)) == rows && out.shape(0) == x.shape(0),
                "shapes do not fit");
        probe_product(isa, job, x.data(), static_cast<int>(x.shape(0)), out.data());
    });
    m.def("unpack_grouped", [](const std::string& stored, int group, int rows, int columns, const Arrays& weights, Table<float> out) {
        PackJob job = grouped_job(stored, group, rows, columns, weights, {});
        require(static_cast<int>(out.shape(0)) == rows && static_cast<int>(out.shape(1)) == columns, "shapes do not fit");
        probe_unpack(job, out.data());
    });
    m.def("attention", [](const std::string& isa, const std::string& kv, std::vector<int> sizes, std::vector<float> factors,
                          Vector<const int32_t> start, Vector<const int32_t> length, Table<const int32_t> tables,
                          Vector<const float> q, Vector<const float> k, Vector<const float> v, Vector<float> out) {
        require(sizes.size() == 6 && factors.size() == 2, "six sizes and two factors");
        Probe p = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], factors[0], factors[1], kv_kind(kv)};
        probe_attention(isa, p, start.data(), length.data(), size(start), tables.data(), static_cast<int>(tables.shape(1)), q.data(),
                        k.data(), v.data(), out.data());
    });
    m.def("sample", [](const std::string& isa, Vector<const float> logits, Vector<const int32_t> params, int position) {
        require(params.size() == kParamWords, "wrong parameter block");
        return probe_sample(isa, logits.data(), static_cast<int>(logits.size()), params.data(), position);
    });
    m.def("time_product", [](const std::string& isa, const std::string& stored, const std::string& format, int rows, int columns,
                             Vector<const uint8_t> weights, int m, int copies, int threads, int repeats) {
        PackJob job = pack_job(stored, format, rows, columns, weights, Vector<const uint8_t>());
        nb::gil_scoped_release release;
        return time_product(isa, job, m, copies, threads, repeats);
    });
    m.def("time_grouped", [](const std::string& isa, const std::string& stored, int group, int rows, int columns, const Arrays& weights,
                             int m, int copies, int threads, int repeats) {
        PackJob job = grouped_job(stored, group, rows, columns, weights, {});
        nb::gil_scoped_release release;
        return time_product(isa, job, m, copies, threads, repeats);
    });
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Octavo's native CPU engine; see octavo.kernels.native.";
    bind_engine(m);
    bind_probes(m);
}
