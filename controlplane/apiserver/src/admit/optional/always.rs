//! Plugins that accept or refuse every request. Upstream keeps them for old command lines.
//!
//! Source: `plugin/pkg/admission/admit` and `plugin/pkg/admission/deny`.

use async_trait::async_trait;
use serde_json::Value;

use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes},
    error::Result,
};

/// The user of this server's own requests. The server could not start if these requests were refused.
const OWN_USER: &str = "system:apiserver";

pub(in crate::admit) struct AlwaysAdmit;

pub(in crate::admit) struct AlwaysDeny;

#[async_trait]
impl Admit for AlwaysAdmit {}

#[async_trait]
impl Admit for AlwaysDeny {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        _object: &mut Value,
    ) -> Result<()> {
        deny(attributes)
    }

    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        _object: &Value,
    ) -> Result<()> {
        deny(attributes)
    }

    fn handles_own_objects(&self) -> bool {
        true
    }
}

fn deny(attributes: &Attributes<'_>) -> Result<()> {
    if attributes.user.name == OWN_USER {
        return Ok(());
    }
    Err(forbidden(attributes, "admission control is denying all modifications"))
}
