//! Refuses new external addresses of Services. Such an address captures the traffic of all nodes and pods to it
//! (CVE-2020-8554).
//!
//! Source: `plugin/pkg/admission/network/denyserviceexternalips`.

use async_trait::async_trait;
use serde_json::Value;

use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
};

pub(in crate::admit) struct DenyServiceExternalIps;

#[async_trait]
impl Admit for DenyServiceExternalIps {
    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !attributes.is(Operation::Create, "Service") && !attributes.is(Operation::Update, "Service") {
            return Ok(());
        }
        let old = attributes.old.map_or(&Value::Null, |old| &old["spec"]["externalIPs"]);
        let had = old.as_array().map_or(&[][..], Vec::as_slice);
        let mut wanted = object["spec"]["externalIPs"].as_array().into_iter().flatten();
        match wanted.any(|address| !had.contains(address)) {
            true => Err(forbidden(attributes, "Use of external IPs is denied by admission control")),
            false => Ok(()),
        }
    }
}
