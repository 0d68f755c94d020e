//! Creates the input of CEL expressions in policies and webhooks from a request.

mod remote_checks;

use coracle_admission_policies::{Input, RequestCost};
use coracle_cel::access::{Access, AccessDecision, Authorize, CheckAttributes};
use coracle_kinds::{Resource, kind::by_resource};
use serde_json::Value;

use self::remote_checks::RemoteChecks;
use super::{Admission, Attributes, review};
use crate::{
    authn::User,
    authz::{AccessAttributes, Decision, Verdict},
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
    remote: RemoteChecks,
}

/// A check that an expression requests, in the form that the authorizers get.
struct Check {
    /// The service account that is checked. `None` for the user of the request.
    account: Option<User>,
    info: RequestInfo,
}

/// Evaluates expressions about a subject. A long evaluation runs outside of the async workers. The evaluation is
/// repeated for each decision of an authorization webhook that it needs. The cost of each repetition counts.
///
/// # Errors
/// Too many requests wait for a long function.
pub(super) async fn evaluate<T>(
    subject: &Subject<'_>,
    is_heavy: bool,
    mut work: impl FnMut() -> T,
) -> Result<T> {
    loop {
        let result = evaluate_once(subject.cost, is_heavy, &mut work).await?;
        let host = &subject.host;
        if !host.remote.decide_missing(|check| host.decide(check)).await {
            return Ok(result);
        }
    }
}

/// Evaluates expressions. If an evaluation costs more than expected, it is repeated from the beginning outside of the
/// async workers.
async fn evaluate_once<T>(cost: &RequestCost, is_heavy: bool, mut work: impl FnMut() -> T) -> Result<T> {
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
            host: Host { admission, user: attributes.user, remote: RemoteChecks::default() },
            check,
            cost: attributes.cost,
        }
    }

    /// The cost of the expressions of the request.
    pub(super) fn cost(&self) -> &RequestCost {
        self.cost
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

// === impl Check ===

impl Check {
    fn new(check: &CheckAttributes) -> Self {
        let account = check.service_account.as_ref().map(|(namespace, name)| {
            let all = format!("system:serviceaccounts:{namespace}");
            let groups = ["system:serviceaccounts", all.as_str(), "system:authenticated"];
            User::new(&format!("system:serviceaccount:{namespace}:{name}"), &groups)
        });
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
        Self { account, info: RequestInfo { verb: "", path, query, resource } }
    }

    fn attributes<'a>(&'a self, host: &'a Host<'_>, verb: &'a str) -> AccessAttributes<'a> {
        let user = self.account.as_ref().unwrap_or(host.user);
        AccessAttributes { user, verb, info: &self.info, cache: &host.admission.cache }
    }
}

// === impl Host ===

impl Host<'_> {
    /// The decision of all authorizers, with webhooks.
    async fn decide(&self, check: CheckAttributes) -> AccessDecision {
        let prepared = Check::new(&check);
        shown(self.admission.authorizers.decide(&prepared.attributes(self, &check.verb)).await)
    }
}

impl Authorize for Host<'_> {
    fn authorize(&self, check: &CheckAttributes) -> AccessDecision {
        if let Some(known) = self.remote.known(check) {
            return known;
        }
        let prepared = Check::new(check);
        let local = self.admission.authorizers.decide_locally(&prepared.attributes(self, &check.verb));
        local.map_or_else(|| self.remote.request(check), shown)
    }
}

/// A decision in the form that expressions get.
fn shown(decision: Decision) -> AccessDecision {
    AccessDecision {
        allowed: decision.verdict == Verdict::Allow,
        reason: decision.reason.into_owned(),
        error: None,
    }
}
