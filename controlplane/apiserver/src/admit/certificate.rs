//! Certificate signing requests: the requester is recorded, and requests for the group of administrators are refused.
//! Users that approve or sign need the permission for the signer.

use async_trait::async_trait;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_certificate_subject::Subject;
use serde_json::{Value, json};
use x509_parser::{
    certification_request::X509CertificationRequest, pem::parse_x509_pem, prelude::FromDer as _,
};

use super::{Admission, Admit, Attributes, Operation};
use crate::{
    error::{ApiError, Result},
    object_meta::now,
    request::ResourceInfo,
};

const GROUP: &str = "certificates.k8s.io";
pub(super) const NODE_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
pub(super) const NODE_SERVING: &str = "kubernetes.io/kubelet-serving";

/// Sets the server-owned fields of requests.
pub(super) struct Requests;

/// The plugin CertificateApproval.
pub(super) struct Approval;

/// The plugin CertificateSigning.
pub(super) struct Signing;

/// The plugin CertificateSubjectRestriction.
pub(super) struct SubjectRestriction;

/// Domain of the signers whose certificates this API server accepts.
const OUR_DOMAIN: &str = "kubernetes.io/";

#[async_trait]
impl Admit for Requests {
    async fn mutate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !is_request(attributes) {
            return Ok(());
        }
        match attributes.operation {
            Operation::Create => set_requester(attributes, object),
            Operation::Update => set_times(object, attributes.old.unwrap_or(&Value::Null), &now()),
            Operation::Delete | Operation::Connect => {}
        }
        Ok(())
    }
}

#[async_trait]
impl Admit for Approval {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if is_update_of(attributes, "approval") {
            may(admission, attributes, "approve", signer(attributes, object)).await
        } else {
            Ok(())
        }
    }
}

#[async_trait]
impl Admit for Signing {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let old = attributes.old.unwrap_or(&Value::Null);
        let is_same = |field: &str| old["status"][field] == object["status"][field];
        if !is_update_of(attributes, "status") || (is_same("certificate") && is_same("conditions")) {
            return Ok(());
        }
        may(admission, attributes, "sign", signer(attributes, object)).await
    }
}

#[async_trait]
impl Admit for SubjectRestriction {
    async fn validate(
        &self,
        _admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if is_request(attributes) && attributes.operation == Operation::Create {
            subject_is_restricted(attributes, object)
        } else {
            Ok(())
        }
    }
}

fn is_update_of(attributes: &Attributes<'_>, subresource: &str) -> bool {
    let is_update = attributes.operation == Operation::Update && attributes.subresource == subresource;
    is_update && is_request(attributes)
}

/// The signer of a request. An update cannot change it.
fn signer<'a>(attributes: &Attributes<'a>, object: &'a Value) -> &'a str {
    attributes.old.unwrap_or(object)["spec"]["signerName"].as_str().unwrap_or_default()
}

pub(super) fn is_request(attributes: &Attributes<'_>) -> bool {
    attributes.kind.group == GROUP && attributes.kind.kind == "CertificateSigningRequest"
}

/// Sets the requester to the authenticated user. Values of the client are ignored.
fn set_requester(attributes: &Attributes<'_>, object: &mut Value) {
    let user = attributes.user;
    let Some(spec) = object["spec"].as_object_mut() else { return };
    spec.retain(|name, _| !matches!(name.as_str(), "username" | "uid" | "groups" | "extra"));
    spec.insert("username".to_owned(), user.name.clone().into());
    spec.insert("groups".to_owned(), json!(user.groups));
    if !user.uid.is_empty() {
        spec.insert("uid".to_owned(), user.uid.clone().into());
    }
    if !user.extra.is_empty() {
        spec.insert("extra".to_owned(), json!(user.extra));
    }
}

/// Sets the times that conditions lack. A condition with an unchanged status keeps its `lastTransitionTime`.
fn set_times(object: &mut Value, old: &Value, now: &str) {
    let before = old["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let list = object["status"].get_mut("conditions").and_then(Value::as_array_mut);
    for condition in list.into_iter().flatten().filter(|condition| condition.is_object()) {
        let known = before.iter().find(|known| known["type"] == condition["type"]);
        if condition["lastUpdateTime"].is_null() {
            condition["lastUpdateTime"] = now.into();
        }
        if condition["lastTransitionTime"].is_null() {
            let same = known.filter(|known| known["status"] == condition["status"]);
            let since = same.map(|known| known["lastTransitionTime"].clone()).filter(Value::is_string);
            condition["lastTransitionTime"] = since.unwrap_or_else(|| now.into());
        }
    }
}

/// Refuses a subject in the group `system:masters`: a certificate with this group would give every permission.
fn subject_is_restricted(attributes: &Attributes<'_>, object: &Value) -> Result<()> {
    let signer = object["spec"]["signerName"].as_str().unwrap_or_default();
    if !signer.starts_with(OUR_DOMAIN) {
        return Ok(());
    }
    let why = match subject(object) {
        Err(why) => why,
        Ok(Some(subject)) if subject.organizations.iter().any(|group| group == "system:masters") => {
            format!("use of {signer} signer with system:masters group is not allowed")
        }
        Ok(_) => return Ok(()),
    };
    Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
}

/// The subject of a request. `None` if the request is malformed; validation refuses it.
///
/// # Errors
/// The subject is ambiguous.
pub(super) fn subject(object: &Value) -> std::result::Result<Option<Subject>, String> {
    let der = || {
        let bytes = BASE64_STANDARD.decode(object["spec"]["request"].as_str()?).ok()?;
        Some(parse_x509_pem(&bytes).ok()?.1.contents)
    };
    let Some(der) = der() else { return Ok(None) };
    let Ok((_, request)) = X509CertificationRequest::from_der(&der) else { return Ok(None) };
    Subject::read(&request.certification_request_info.subject).map(Some)
}

/// Checks the permission for the signer, or for all signers of its domain.
async fn may(
    admission: &Admission,
    attributes: &Attributes<'_>,
    verb: &'static str,
    signer: &str,
) -> Result<()> {
    let allowed = async |name: &str| {
        let resource = ResourceInfo {
            group: GROUP.to_owned(),
            version: "*".to_owned(),
            resource: "signers".to_owned(),
            name: name.to_owned(),
            ..ResourceInfo::default()
        };
        admission.authorize_also(attributes.user, verb, resource).await.is_ok()
    };
    let domain = signer.split('/').next().unwrap_or_default();
    if allowed(signer).await || allowed(&format!("{domain}/*")).await {
        return Ok(());
    }
    let why = format!("user not permitted to {verb} requests with signerName \"{signer}\"");
    Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_conditions_are_dated_and_old_ones_keep_their_dates() {
        let old = json!({"status": {"conditions": [
            {"type": "Approved", "status": "True", "lastUpdateTime": "a", "lastTransitionTime": "b"}]}});
        let mut new = json!({"status": {"conditions": [
            {"type": "Approved", "status": "True", "lastUpdateTime": "a"}, {"type": "Failed", "status": "True"}]}});
        set_times(&mut new, &old, "now");
        let conditions = &new["status"]["conditions"];
        assert_eq!(
            (&conditions[0]["lastUpdateTime"], &conditions[0]["lastTransitionTime"]),
            (&json!("a"), &json!("b"))
        );
        assert_eq!(conditions[1]["lastTransitionTime"], "now");
    }
}
