//! The semantics of Kubernetes values: quantities, names, selectors, taints, pod resources, object metadata.
//!
//! The API server, the scheduler, the controllers and the agent must agree on these rules, so each rule is here once.
//! Each module names the upstream package that specifies it.
//!
//! | value | module | upstream |
//! |---|---|---|
//! | `500m`, `1Gi` | [`quantity`] | `apimachinery/pkg/api/resource` |
//! | DNS labels, qualified names, keys | [`names`] | `apimachinery/pkg/api/validate/content`, `pkg/util/validation` |
//! | label selectors, maps of labels | [`label_selector`] | `apimachinery/pkg/labels` |
//! | field selectors | [`field_selector`] | `apimachinery/pkg/fields` |
//! | node affinity terms | [`node_selector`] | `component-helpers/scheduling/corev1/nodeaffinity` |
//! | taints and tolerations | [`toleration`] | `component-helpers/scheduling/corev1` |
//! | effective requests and limits of a pod | [`pod_resources`] | `component-helpers/resource` |
//! | quality-of-service class of a pod | [`qos`] | `pkg/apis/core/v1/helper/qos` |
//! | restart policies and rules, requirements on exit codes | [`restart`] | `pkg/api/v1/pod`, `pkg/controller/job` |
//! | booleans, quoted text, names of JSON kinds and architectures in the forms of Go | [`go`] | `strconv`, `encoding/json` |
//! | merge patches between values | [`merge_patch`] | RFC 7386 |
//! | name, namespace, uid, owner of an object | [`object`] | `apimachinery/pkg/apis/meta/v1` |
//! | media types and the header `Accept` | [`media_type`] | RFC 9110 |
//! | values of labels of metrics | [`metric_label`] | Prometheus' text format |
//! | lists of strings in JSON | [`string_list`] | |
//! | bootstrap tokens | [`BootstrapToken`] | `cluster-bootstrap/token/util` |
//! | maps from pairs | [`CollectMap`] | |
//! | pages `/statusz` and `/flagz` | [`component_page`] | `apiserver/pkg/server/statusz`, `apiserver/pkg/server/flagz` |
//!
//! Invariants: no I/O, no async, no clock, no panic on any input. Each text has a limit on its size or is read in
//! linear time.

mod bootstrap_token;
mod collect_map;
pub mod component_page;
pub mod field_selector;
pub mod go;
pub mod label_selector;
pub mod media_type;
pub mod merge_patch;
pub mod metric_label;
pub mod names;
pub mod node_selector;
pub mod object;
pub mod pod_resources;
pub mod qos;
pub mod quantity;
pub mod restart;
mod selector_error;
pub mod string_list;
pub mod toleration;

#[doc(hidden)]
pub use kube_core;

pub use bootstrap_token::BootstrapToken;
pub use collect_map::CollectMap;
pub use quantity::Quantity;
pub use selector_error::SelectorError;
