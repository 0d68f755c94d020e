//! Parameters of policies: the objects that a binding names. Source: `policy/generic/policy_dispatcher.go`,
//! CollectParams.

use std::sync::Arc;

use coracle_kinds::{Resource, selector::LabelSelector};
use serde_json::Value;

use crate::{admit::Admission, cache::Object, convert};

/// Maximum number of parameters of one binding. Tenants may create objects that a selector finds, and a policy is
/// evaluated for each of them. The limit is lower in tests.
const MAX_PARAMS: usize = if cfg!(test) { 20 } else { 1000 };

/// Reason why the parameters of a binding cannot be collected. The client receives the text.
#[derive(Debug)]
pub(super) enum ParamError {
    /// An error that also exists upstream. The failure policy applies.
    Failed(String),
    /// The number of parameters exceeds the limit. Upstream has no limit, so the failure policy `Ignore` does not
    /// apply: otherwise tenants could create parameters until a policy no longer restricts them.
    TooMany(String),
}

/// `paramKind` of a policy.
pub(super) struct ParamKind {
    group: String,
    version: String,
    kind: String,
}

/// `paramRef` of a binding.
pub(super) struct ParamRef {
    name: String,
    namespace: String,
    selector: Option<LabelSelector>,
    /// Whether missing parameters are an error, to which the failure policy applies.
    must_exist: bool,
}

impl ParamKind {
    pub(super) fn read(kind: &Value) -> Option<Self> {
        let api_version = kind["apiVersion"].as_str()?;
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let kind = kind["kind"].as_str()?.to_owned();
        Some(Self { group: group.to_owned(), version: version.to_owned(), kind })
    }
}

impl ParamRef {
    pub(super) fn read(reference: &Value) -> Option<Self> {
        let text = |field: &str| reference[field].as_str().unwrap_or_default().to_owned();
        let selector = &reference["selector"];
        reference.is_object().then(|| Self {
            name: text("name"),
            namespace: text("namespace"),
            selector: selector.is_object().then(|| LabelSelector::from_object(selector).unwrap_or_default()),
            must_exist: reference["parameterNotFoundAction"] != "Allow",
        })
    }
}

/// The parameters of a binding for a request in a namespace. If the policy has no `paramKind` or the binding no
/// `paramRef`, the result is the single entry `None`.
///
/// # Errors
/// The parameters cannot be found or converted, or there are too many.
pub(super) async fn collect(
    admission: &Admission,
    kind: Option<&ParamKind>,
    reference: Option<&ParamRef>,
    namespace: &str,
) -> Result<Vec<Option<Value>>, ParamError> {
    let (Some(kind), Some(reference)) = (kind, reference) else { return Ok(vec![None]) };
    let resource = admission.registry.load().find_kind(&kind.group, &kind.version, &kind.kind).cloned();
    let Some(resource) = resource.filter(|resource| resource.is_stored()) else {
        let ParamKind { group, version, kind } = kind;
        let why =
            format!("failed to find resource referenced by paramKind: '{group}/{version}, Kind={kind}'");
        return Err(ParamError::Failed(why));
    };
    let namespace = parameter_namespace(&resource, reference, namespace).map_err(ParamError::Failed)?;
    if admission.cache.check_complete(&resource, namespace).is_err() {
        let ParamKind { group, version, kind } = kind;
        let separator = if group.is_empty() { "" } else { "/" };
        let why = format!(
            "paramKind kind `{group}{separator}{version}, Kind={kind}` not yet synced to use for admission"
        );
        return Err(ParamError::Failed(why));
    }
    let mut found = Vec::new();
    match &reference.selector {
        None => found.extend(admission.cache.get(&resource, namespace, &reference.name)),
        Some(selector) => {
            let all = admission.cache.list(&resource, namespace);
            let is_chosen = |object: &Arc<Object>| {
                object.selector_attributes(resource.stored_as()).match_labels(selector)
            };
            found.extend(all.into_iter().filter(is_chosen));
        }
    }
    if found.is_empty() && reference.must_exist {
        let why = "no params found for policy binding with `Deny` parameterNotFoundAction";
        return Err(ParamError::Failed(why.to_owned()));
    }
    let number = found.len();
    if number > MAX_PARAMS {
        let why = format!("the selector finds {number} params, of which at most {MAX_PARAMS} are supported");
        return Err(ParamError::TooMany(why));
    }
    let mut params = Vec::with_capacity(number);
    for object in found {
        let value = convert::value(&resource, object.value()).await;
        let value = value.map_err(|error| ParamError::Failed(error.message))?;
        params.push(Some(value));
    }
    Ok(params)
}

impl std::fmt::Display for ParamError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Failed(why) | Self::TooMany(why)) = self;
        write!(f, "failed to configure binding: {why}")
    }
}

/// The namespace of the parameters: the namespace of `paramRef`, or else the namespace of the request. Empty for a
/// cluster-scoped kind.
fn parameter_namespace<'a>(
    resource: &Resource,
    reference: &'a ParamRef,
    request: &'a str,
) -> Result<&'a str, String> {
    match (resource.namespaced, reference.namespace.as_str()) {
        (false, "") => Ok(""),
        (false, _) => {
            Err("paramRef.namespace must not be provided for a cluster-scoped `paramKind`".to_owned())
        }
        (true, "") if request.is_empty() => {
            Err("cannot use namespaced paramRef in policy binding that matches cluster-scoped resources"
                .to_owned())
        }
        (true, "") => Ok(request),
        (true, namespace) => Ok(namespace),
    }
}
