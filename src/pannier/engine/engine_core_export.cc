// The model as others read it, straight from the engine.
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <exception>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include "pannier/base/error.h"
#include "pannier/ckpt/share.h"
#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/engine_core.h"
#include "pannier/engine/frozen_pieces.h"
#include "pannier/engine/shared_outcome.h"

namespace pannier {
namespace {

/// Rank 0's export; on the others nothing. It keeps the first error, so that what all ranks do goes on to its end.
class ExportOnRank0 {
 public:
  ExportOnRank0(Device& device, bool is_writer) : device_(device), is_writer_(is_writer) {}

  void open(const std::string& path, std::vector<ckpt::TensorInfo> tensors, const ckpt::ModelExportOptions& options) {
    attempt([&] {
      std::error_code error;
      std::filesystem::create_directories(path, error);
      if (error) {
        throw IoError(fmt::format("make folder '{}'", path), error.value());
      }
      folder_.emplace(path);
      model_.emplace(*folder_, std::move(tensors), options);
    });
  }
  void write(const at::Tensor& tensor) {
    attempt([&] {
      const at::Tensor rows = tensor.detach().contiguous();
      const auto width = static_cast<std::size_t>(rows.element_size());
      std::vector<std::byte> bytes;
      for (std::int64_t at = 0; at < rows.numel(); at = ckpt::chunk_end(at, rows.numel())) {
        bytes.resize(static_cast<std::size_t>(ckpt::chunk_end(at, rows.numel()) - at) * width);
        bytes_to_host(device_, bytes.data(), rows, static_cast<std::size_t>(at) * width, bytes.size());
        model_->write(bytes);
      }
    });
  }
  void finish() {
    attempt([&] { model_->finish(); });
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  template <class Body>
  void attempt(const Body& body) {
    if (is_writer_ && !error_) {
      try {
        body();
      } catch (const std::exception&) {
        error_ = std::current_exception();
      }
    }
  }

  Device& device_;
  bool is_writer_;
  std::optional<ckpt::SealedFolder> folder_;
  std::optional<ckpt::ModelExport> model_;
  std::exception_ptr error_;
};

}  // namespace

void EngineCore::export_model(const std::string& folder, const ckpt::ModelExportOptions& options,
                              const std::vector<NamedTensor>& untrained) {
  const c10::NoGradGuard no_grad;
  (void)done_by_all(*communicator_, "the export of a model", [&] {
    require_loaded();
    rest_for_checkpoint("save_16bit_model()");
    return std::string();
  });
  std::vector<ckpt::TensorInfo> tensors;
  std::vector<std::vector<int>> buckets;
  const std::vector<int> partitioned = partitioned_of(parts_.get(), untrained);
  const std::set<int> wanted(partitioned.begin(), partitioned.end());
  for (int b = 0; parts_ != nullptr && b < parts_->model_layout->num_buckets(); ++b) {
    buckets.emplace_back();
    for (const Segment& segment : parts_->model_layout->buckets()[static_cast<std::size_t>(b)].segments) {
      if (segment.parameter >= parts_->layout->num_parameters() && !wanted.contains(segment.parameter)) {
        continue;  // Small, and so whole; or left out.
      }
      const std::string& name = parts_->parameters->name(segment.parameter);
      tensors.push_back({name, checkpoint_dtype(parts_->parameters->dtype(b), name),
                         parts_->parameters->parameter(segment.parameter).sizes().vec()});
      buckets.back().push_back(segment.parameter);
    }
  }
  const std::vector<NamedTensor> whole = whole_of(parts_.get(), untrained);
  for (const auto& [name, tensor] : whole) {
    tensors.push_back({name, checkpoint_dtype(tensor.scalar_type(), name), tensor.sizes().vec()});
  }
  ExportOnRank0 model(*device_, communicator_->rank() == 0);
  model.open(folder, std::move(tensors), options);
  for (const auto& bucket : buckets) {
    if (gatherer() != nullptr) {
      gatherer()->hold(bucket);
    }
    for (const int parameter : bucket) {
      model.write(parts_->parameters->parameter(parameter));
    }
    if (gatherer() != nullptr) {
      gatherer()->let_go(bucket);
    }
  }
  for (const auto& named : whole) {
    model.write(named.tensor);
  }
  (void)done_by_all(*communicator_, "the end of a model's export", [&] {
    model.finish();
    return std::string();
  });
}

}  // namespace pannier
