//! Horizontal pod autoscalers.

use std::borrow::Cow;

use k8s_openapi::api::autoscaling::v2::{HorizontalPodAutoscalerSpec, HorizontalPodAutoscalerStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
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

// The macro `resource` serves kinds of version v1 only.
impl kube::Resource for HorizontalPodAutoscaler {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "HorizontalPodAutoscaler".into()
    }
    fn group((): &()) -> Cow<'_, str> {
        "autoscaling".into()
    }
    fn version((): &()) -> Cow<'_, str> {
        "v2".into()
    }
    fn plural((): &()) -> Cow<'_, str> {
        "horizontalpodautoscalers".into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Object for HorizontalPodAutoscaler {}
