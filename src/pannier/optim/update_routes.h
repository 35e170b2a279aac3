// Which way each bucket is updated, and which store and path that means. The one table that a new split changes.
#pragma once

#include <vector>

#include "pannier/optim/update_path.h"
#include "pannier/plan/update_route.h"
#include "pannier/tier/state_store.h"

namespace pannier {

/// The route of every bucket. What the ways point to must outlive it. One thread.
class UpdateRoutes {
 public:
  /// Who lends the states, and how they are worked on.
  struct Way {
    StateStore* states = nullptr;
    UpdatePath* path = nullptr;
  };

  UpdateRoutes(std::vector<UpdateRoute> routes, Way device, Way streamed, Way host)
      : routes_(std::move(routes)), device_(device), streamed_(streamed), host_(host) {}

  [[nodiscard]] UpdateRoute route(int bucket) const { return routes_.at(static_cast<std::size_t>(bucket)); }
  [[nodiscard]] const std::vector<UpdateRoute>& routes() const noexcept { return routes_; }
  void set(int bucket, UpdateRoute route) { routes_.at(static_cast<std::size_t>(bucket)) = route; }
  /// The way of a bucket's update.
  [[nodiscard]] const Way& update_way(int bucket) const {
    switch (route(bucket)) {
      case UpdateRoute::kStreamed:
        return streamed_;
      case UpdateRoute::kHost:
        return host_;
      case UpdateRoute::kDevice:
        break;
    }
    return device_;
  }
  /// The way to a bucket's state where it rests.
  [[nodiscard]] const Way& rest_way(int bucket) const {
    return route(bucket) == UpdateRoute::kDevice ? device_ : host_;
  }

 private:
  std::vector<UpdateRoute> routes_;
  Way device_, streamed_, host_;
};

}  // namespace pannier
