//! Refuses certificate requests that use the bootstrap token of another machine. The client gets the error immediately,
//! and the request is not stored. If two requests are concurrent, the approving controller accepts only one of them.

use async_trait::async_trait;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation, certificate};
use crate::error::{ApiError, Result};

pub(super) struct BootstrapToken;

#[async_trait]
impl Admit for BootstrapToken {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let Some(id) = attributes.user.name.strip_prefix("system:bootstrap:") else { return Ok(()) };
        let asks = attributes.operation == Operation::Create && certificate::is_request(attributes);
        if !asks || object["spec"]["signerName"] != certificate::NODE_CLIENT {
            return Ok(());
        }
        let kind = by_resource("", "v1", "secrets").ok_or_else(ApiError::no_resource)?;
        admission.cache.check_readable(kind)?;
        let secret = admission.cache.get(kind, "kube-system", &format!("bootstrap-token-{id}"));
        let Some(other) = secret.and_then(|secret| used_by(&secret.value())) else { return Ok(()) };
        let subject = certificate::subject(object).ok().flatten();
        if subject.is_some_and(|subject| subject.common_name == format!("system:node:{other}")) {
            return Ok(());
        }
        let why = format!(
            "token {id} is for one machine only, and node {other} has used it; create another with `coracle token create`"
        );
        Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
    }

    fn precedes_validation(&self) -> bool {
        true
    }
}

/// The node that has used a single-machine token. `None` if the token is unused, or valid for several machines.
fn used_by(secret: &Value) -> Option<String> {
    let field = |name: &str| {
        let bytes = BASE64_STANDARD.decode(secret["data"][name].as_str()?).ok()?;
        String::from_utf8(bytes).ok()
    };
    (field("usage-single-node").as_deref() == Some("true")).then(|| field("used-by-node"))?
}
