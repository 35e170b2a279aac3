#include "pannier/binding/checkpoint.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace pannier::binding {
namespace {

using Self = c10::intrusive_ptr<EngineHolder>;
using Texts = c10::Dict<std::string, std::string>;
using Bytes = c10::Dict<std::string, at::Tensor>;
using Names = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

std::vector<NamedTensor> named(const Names& names, const Tensors& tensors) {
  std::vector<NamedTensor> result;
  for (std::size_t i = 0; i < names.size(); ++i) {
    result.push_back({names[i], tensors.at(i)});
  }
  return result;
}

std::map<std::string, std::string> to_map(const Texts& texts) {
  std::map<std::string, std::string> result;
  for (const auto& item : texts) {
    result[item.key()] = item.value();
  }
  return result;
}

Texts from_map(const std::map<std::string, std::string>& texts) {
  Texts result;
  for (const auto& [key, value] : texts) {
    result.insert(key, value);
  }
  return result;
}

Bytes from_bytes(const NamedBytes& bytes) {
  Bytes result;
  for (const auto& [name, tensor] : bytes) {
    result.insert(name, tensor);
  }
  return result;
}

/// Path, attributes, rank 0's bytes, this rank's, and the missing, the unexpected and the states that started anew.
using Loaded = std::tuple<std::string, Texts, Bytes, Bytes, std::vector<Names>>;

}  // namespace

void define_checkpoint(torch::class_<EngineHolder>& engine) {
  engine
      .def("refuse_checkpoint",
           [](const Self& self, const std::string& why) { translated([&] { self->core.refuse_checkpoint(why); }); })
      .def("save_checkpoint",
           [](const Self& self, const std::string& folder, const std::string& tag, bool set_latest,
              bool excludes_frozen, const c10::List<Numbers>& groups, const Names& frozen_names, const Tensors& frozen,
              const Names& buffer_names, const Tensors& buffers, const Texts& aliases, const Texts& attributes,
              const Bytes& bytes) {
             return translated([&] {
               CheckpointContents contents{.groups = to_hyperparameters(groups),
                                           .frozen = named(frozen_names, frozen),
                                           .buffers = named(buffer_names, buffers),
                                           .aliases = to_map(aliases),
                                           .attributes = to_map(attributes),
                                           .bytes = {},
                                           .excludes_frozen = excludes_frozen};
               for (const auto& item : bytes) {
                 contents.bytes[item.key()] = item.value();
               }
               return self->core.save_checkpoint({folder, tag, set_latest}, contents);
             });
           })
      .def("finish_checkpoint", [](const Self& self) { translated([&] { self->core.finish_checkpoint(); }); })
      .def("load_checkpoint",
           [](const Self& self, const std::string& folder, const std::string& tag, bool strict, bool optimizer_states,
              bool module_only, bool parameters, std::int64_t num_groups, const Names& schedules,
              const Names& frozen_names, const Tensors& frozen, const Names& buffer_names, const Tensors& buffers) {
             return translated([&]() -> Loaded {
               const auto loaded = self->core.load_checkpoint({.folder = folder,
                                                               .tag = tag,
                                                               .strict = strict,
                                                               .optimizer_states = optimizer_states,
                                                               .module_only = module_only,
                                                               .parameters = parameters,
                                                               .num_groups = static_cast<std::size_t>(num_groups),
                                                               .schedules = schedules,
                                                               .frozen = named(frozen_names, frozen),
                                                               .buffers = named(buffer_names, buffers)});
               if (!loaded) {
                 return {"", Texts(), Bytes(), Bytes(), {}};
               }
               return {loaded->path,
                       from_map(loaded->attributes),
                       from_bytes(loaded->common),
                       from_bytes(loaded->own),
                       {loaded->missing, loaded->unexpected, loaded->missing_states}};
             });
           })
      .def("export_model", [](const Self& self, const std::string& folder, const std::string& name,
                              std::int64_t max_shard_nbytes, const Names& names, const Tensors& tensors) {
        translated([&] {
          self->core.export_model(folder,
                                  {.max_shard_nbytes = static_cast<std::uint64_t>(max_shard_nbytes), .name = name},
                                  named(names, tensors));
        });
      });
}

}  // namespace pannier::binding
