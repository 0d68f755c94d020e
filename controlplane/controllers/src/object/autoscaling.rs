//! Horizontal pod autoscalers.

use coracle_values::resource;
use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscalerSpec, HorizontalPodAutoscalerStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::Object;

/// A horizontal pod autoscaler in version v2, which the API server converts to and from v1.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct HorizontalPodAutoscaler {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: HorizontalPodAutoscalerSpec,
    pub(crate) status: HorizontalPodAutoscalerStatus,
}

resource!(
    HorizontalPodAutoscaler,
    "HorizontalPodAutoscaler",
    ("autoscaling", "v2", "horizontalpodautoscalers"),
    NamespaceResourceScope
);

impl Object for HorizontalPodAutoscaler {}
