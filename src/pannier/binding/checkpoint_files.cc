#include "pannier/binding/checkpoint_files.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <string>
#include <vector>

#include "pannier/binding/classes.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/model_export.h"
#include "pannier/engine/checkpoint_tensors.h"

namespace pannier::binding {
namespace {

using Texts = c10::Dict<std::string, std::string>;

ckpt::SealedFolder tag_folder(const std::string& folder, const std::string& tag) {
  if (!tag.empty()) {
    return ckpt::SealedFolder(folder).folder(tag);
  }
  const auto latest = ckpt::CheckpointFolder(folder).latest();
  if (!latest) {
    throw ConfigError(fmt::format("'{}' has no file 'latest', and no tag was given", folder));
  }
  return ckpt::SealedFolder(folder).folder(*latest);
}

/// A tag that can be read.
class CheckpointFile : public torch::CustomClassHolder {
 public:
  CheckpointFile(const std::string& folder, const std::string& tag)
      : reader_(translated([&] { return ckpt::CheckpointReader(tag_folder(folder, tag)); })) {}

  [[nodiscard]] std::string path() const { return reader_.path(); }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& tensor : reader_.manifest().tensors) {
      names.push_back(tensor.name);
    }
    return names;
  }
  [[nodiscard]] Texts attributes() const {
    Texts result;
    for (const auto& [key, value] : reader_.manifest().attributes) {
      result.insert(key, value);
    }
    return result;
  }
  /// The tensor, checked, in its own type and with its rows after one another.
  [[nodiscard]] at::Tensor read(const std::string& name) {
    return translated([&] {
      const ckpt::TensorInfo* info = reader_.find(name);
      if (info == nullptr) {
        throw ConfigError(fmt::format("'{}' has no tensor '{}'", reader_.path(), name));
      }
      const at::Tensor stored = at::empty(info->shape, torch_dtype(info->dtype));
      reader_.read(name, 0, {static_cast<std::byte*>(stored.data_ptr()), stored.nbytes()});
      // The order is the parameter's, whose name is what follows "model." or "optimizer.STATE.".
      const std::size_t prefix = name.starts_with(kModelPrefix) ? name.find('.') : name.find('.', name.find('.') + 1);
      const auto order = order_from(reader_.attribute("order." + name.substr(prefix + 1)), info->shape.size());
      std::vector<std::int64_t> dimensions(order.size());
      for (std::size_t i = 0; i < order.size(); ++i) {
        dimensions[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
      }
      return stored.permute(dimensions).contiguous();
    });
  }

 private:
  ckpt::CheckpointReader reader_;
};

/// A tag that is being made of tensors.
class Builder : public torch::CustomClassHolder {
 public:
  Builder(const std::string& folder, const std::string& tag, const std::vector<std::string>& names,
          const std::vector<at::ScalarType>& types, const std::vector<std::vector<std::int64_t>>& shapes)
      : builder_(translated([&] {
          std::vector<ckpt::TensorInfo> tensors;
          for (std::size_t i = 0; i < names.size(); ++i) {
            tensors.push_back({names[i], checkpoint_dtype(types.at(i), names[i]), shapes.at(i)});
          }
          return std::make_unique<ckpt::CheckpointBuilder>(folder, tag, std::move(tensors));
        })) {}

  void write(const at::Tensor& tensor) {
    translated([&] {
      const at::Tensor rows = tensor.detach().cpu().contiguous();
      builder_->write({static_cast<const std::byte*>(rows.data_ptr()), rows.nbytes()});
    });
  }
  void commit(std::int64_t step, const Texts& attributes) {
    translated([&] {
      std::map<std::string, std::string> texts;
      for (const auto& item : attributes) {
        texts[item.key()] = item.value();
      }
      builder_->commit(step, std::move(texts));
    });
  }

 private:
  std::unique_ptr<ckpt::CheckpointBuilder> builder_;
};

}  // namespace

void define_checkpoint_files(torch::Library& library) {
  library.def("parse_size(str text) -> int", [](const std::string& text) {
    return translated([&] { return static_cast<std::int64_t>(ckpt::parse_size(text)); });
  });
  library.def("consolidate(str folder, str tag, str out, str dtype, str max_shard_size) -> str[]",
              [](const std::string& folder, const std::string& tag, const std::string& out, const std::string& dtype,
                 const std::string& max_shard_size) {
                return translated([&] {
                  ckpt::CheckpointReader reader(tag_folder(folder, tag));
                  return ckpt::consolidate(reader, out, ckpt::export_dtype(dtype),
                                           {.max_shard_nbytes = ckpt::parse_size(max_shard_size)});
                });
              });
  library.class_<CheckpointFile>("CheckpointFile")
      .def(torch::init<std::string, std::string>())
      .def("path", &CheckpointFile::path)
      .def("names", &CheckpointFile::names)
      .def("attributes", &CheckpointFile::attributes)
      .def("read", &CheckpointFile::read);
  library.class_<Builder>("CheckpointBuilder")
      .def(torch::init<std::string, std::string, std::vector<std::string>, std::vector<at::ScalarType>,
                       std::vector<std::vector<std::int64_t>>>())
      .def("write", &Builder::write)
      .def("commit", &Builder::commit);
}

}  // namespace pannier::binding
