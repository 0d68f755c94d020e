//! Limits required pod anti-affinity to the topology of nodes. With a larger topology one pod could exclude all other
//! pods from a zone.
//!
//! Source: `plugin/pkg/admission/antiaffinity`.

use async_trait::async_trait;
use serde_json::Value;

use super::{forbidden, writes_pod};
use crate::{
    admit::{Admission, Admit, Attributes},
    error::Result,
};

const NODE: &str = "kubernetes.io/hostname";

pub(in crate::admit) struct HardAntiAffinity;

#[async_trait]
impl Admit for HardAntiAffinity {
    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !writes_pod(attributes) {
            return Ok(());
        }
        let terms =
            &object["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let mut terms = terms.as_array().into_iter().flatten();
        match terms.find(|term| term["topologyKey"] != NODE) {
            None => Ok(()),
            Some(term) => Err(forbidden(
                attributes,
                format!(
                    "affinity.PodAntiAffinity.RequiredDuringScheduling has TopologyKey {} but only key {NODE} is allowed",
                    term["topologyKey"].as_str().unwrap_or_default()
                ),
            )),
        }
    }
}
