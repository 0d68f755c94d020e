//! Creates the input of CEL expressions in policies and webhooks from a request.

use coracle_admission_policies::{Input, RequestCost};
use coracle_cel::access::{Access, AccessDecision, Authorize, CheckAttributes};
use coracle_kinds::{Resource, kind::by_resource};
use futures::FutureExt as _;
use serde_json::Value;

use super::{Admission, Attributes, review};
use crate::{
    authn::User,
    authz::{AccessAttributes, Verdict},
    error::Result,
    offload,
    request::{Query, RequestInfo, ResourceInfo},
};

static NULL: Value = Value::Null;

/// Cost of an evaluation, or of all evaluations of a request, above which expressions run outside of the async workers.
/// It corresponds to some milliseconds.
pub(super) const LIGHT: u64 = 100_000;

/// The data that an [`Input`] borrows.
pub(super) struct Subject<'a> {
    request: Value,
    namespace: Value,
    host: Host<'a>,
    check: CheckAttributes,
    cost: &'a RequestCost,
}

/// Checks permissions for expressions.
struct Host<'a> {
    admission: &'a Admission,
    user: &'a User,
}

/// Evaluates expressions. A long evaluation runs outside of the async workers. If an evaluation costs more than
/// expected, it is repeated from the beginning outside of the async workers.
///
/// # Errors
/// Too many requests wait for a long function.
pub(super) async fn evaluate<T>(
    cost: &RequestCost,
    is_heavy: bool,
    mut work: impl FnMut() -> T,
) -> Result<T> {
    let is_heavy = is_heavy || cost.spent() > LIGHT;
    let light = if is_heavy { None } else { cost.attempt(LIGHT, &mut work) };
    match light {
        Some(result) => Ok(result),
        None => {
            let result = offload::run_long(true, work).await?;
            // An await point, so that the request's timeout can take effect.
            tokio::task::yield_now().await;
            Ok(result)
        }
    }
}

impl<'a> Subject<'a> {
    /// Prepares the request. `kind` is the version of the resource that a rule names.
    pub(super) fn new(admission: &'a Admission, attributes: &Attributes<'a>, kind: &Resource) -> Self {
        let namespace = match attributes.namespace {
            "" => Value::Null,
            _ if attributes.kind.is("", "Namespace") => Value::Null,
            name => by_resource("", "v1", "namespaces")
                .and_then(|kind| admission.cache.get(kind, "", name))
                .map_or(Value::Null, |object| object.value()),
        };
        let check = CheckAttributes {
            group: attributes.kind.group.to_string(),
            version: attributes.kind.version.to_string(),
            resource: attributes.kind.plural.to_string(),
            subresource: attributes.subresource.to_owned(),
            namespace: attributes.namespace.to_owned(),
            name: attributes.known_name().to_owned(),
            ..CheckAttributes::default()
        };
        let request = review::attributes(attributes, kind);
        Self {
            request,
            namespace,
            host: Host { admission, user: attributes.user },
            check,
            cost: attributes.cost,
        }
    }

    /// The input for an object and a parameter. Without a parameter `params` is null.
    pub(super) fn input<'s>(&'s self, objects: &'s review::Objects, params: Option<&'s Value>) -> Input<'s> {
        Input {
            request: &self.request,
            object: &objects.new,
            old: &objects.old,
            namespace: &self.namespace,
            params: params.unwrap_or(&NULL),
            authorizer: Access::new(&self.host, self.check.clone()),
            cost: self.cost,
        }
    }
}

impl Authorize for Host<'_> {
    fn authorize(&self, check: &CheckAttributes) -> AccessDecision {
        let account = check.service_account.as_ref().map(|(namespace, name)| {
            let all = format!("system:serviceaccounts:{namespace}");
            let groups = ["system:serviceaccounts", all.as_str(), "system:authenticated"];
            User::new(&format!("system:serviceaccount:{namespace}:{name}"), &groups)
        });
        let user = account.as_ref().unwrap_or(self.user);
        let failed =
            |error: &str| AccessDecision { error: Some(error.to_owned()), ..AccessDecision::default() };
        let resource = check.path.is_none().then(|| ResourceInfo {
            group: check.group.clone(),
            version: check.version.clone(),
            namespace: check.namespace.clone(),
            below_namespace: !check.namespace.is_empty(),
            resource: check.resource.clone(),
            name: check.name.clone(),
            subresource: check.subresource.clone(),
            ..ResourceInfo::default()
        });
        let path = check.path.clone().unwrap_or_default();
        let query = Query::of_selectors(check.field_selector.clone(), check.label_selector.clone());
        let info = RequestInfo { verb: "", path, query, resource };
        let attributes =
            AccessAttributes { user, verb: &check.verb, info: &info, cache: &self.admission.cache };
        // An expression cannot wait. Local authorizers decide immediately.
        let Some(decision) = self.admission.authorizers.decide(&attributes).now_or_never() else {
            return failed("the authorizer did not decide immediately");
        };
        AccessDecision {
            allowed: decision.verdict == Verdict::Allow,
            reason: decision.reason.into_owned(),
            error: None,
        }
    }
}
