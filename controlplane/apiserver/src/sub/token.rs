//! POST serviceaccounts/token: a token that expires, and becomes invalid when its bound object is deleted.

mod audience;

use coracle_kinds::{
    kind::by_resource,
    validate::{self, Cause},
};
use serde_json::{Value, json};

use self::audience::TokenPod;
use super::{body_of, parent};
use crate::{
    admit::Operation,
    authn::service_account::Claims,
    call::Call,
    error::{ApiError, Result},
    reply::{self, Reply},
    write::text,
};

/// Default lifetime of a token in seconds.
const DEFAULT_SECONDS: i64 = 3600;
/// Minimum and maximum of the requested lifetime in seconds, as upstream.
const MIN_SECONDS: i64 = 600;
const MAX_SECONDS: i64 = 1 << 32;

/// Lifetime that the plugin ServiceAccount requests, and the lifetime to which such a token can be extended. Source:
/// `WarnOnlyBoundTokenExpirationPeriod` and `ExpirationExtensionSeconds` of `pkg/serviceaccount`.
const EXTENDABLE_SECONDS: i64 = 3607;
const EXTENDED_SECONDS: i64 = 365 * 24 * 3600;

/// The fields of a bound object that a token request is checked against. The other fields are not parsed.
const BOUND_FIELDS: [&[&str]; 4] =
    [&["metadata", "uid"], &["spec", "serviceAccountName"], &["spec", "nodeName"], &["spec", "volumes"]];

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    call.dry_run()?;
    let (mut request, warnings) = body_of(call).await?;
    set_name(call, &mut request)?;
    let account = parent(call).await?;
    check_uid(call, text(&request, "uid"), text(&account, "uid"))?;
    let mut request = call.admit_subresource(Operation::Create, request).await?;
    let mut seconds = request["spec"]["expirationSeconds"].as_i64().unwrap_or(DEFAULT_SECONDS);
    if !(MIN_SECONDS..=MAX_SECONDS).contains(&seconds) {
        let causes = validate::token_request(&request);
        return Err(ApiError::invalid_parameters("TokenRequest", "authentication.k8s.io", &causes));
    }
    let tokens = &call.state.authenticators.tokens;
    let limits = [tokens.keys.max_seconds(), call.state.max_token_seconds];
    if let Some(most) = limits.into_iter().flatten().min().filter(|most| *most < seconds) {
        let text = format!("requested expiration of {seconds} seconds shortened to {most} seconds");
        call.warnings.add(text);
        seconds = most;
    }
    let asked = request["spec"]["audiences"].as_array().into_iter().flatten();
    let mut audiences: Vec<String> = asked.filter_map(Value::as_str).map(str::to_owned).collect();
    if audiences.is_empty() {
        audiences.clone_from(&tokens.audiences);
    }
    let bound = bound(call, &request["spec"]).await?;
    let claims = Claims {
        namespace: call.namespace(),
        name: text(&account, "name"),
        uid: text(&account, "uid"),
        audiences: &audiences,
        seconds,
        extended: extended(call, &bound, &audiences, seconds),
        bound,
    };
    let (token, until) = tokens.issue(&claims).await?;
    let until = jiff::Timestamp::from_second(until).map_err(ApiError::internal)?;
    request["spec"]["audiences"] = audiences.into();
    request["spec"]["expirationSeconds"] = seconds.into();
    request["status"] = json!({"token": token, "expirationTimestamp": until.to_string()});
    request["metadata"] = json!({
        "name": account["metadata"]["name"], "namespace": call.namespace(), "uid": account["metadata"]["uid"],
        "creationTimestamp": crate::write::now(),
    });
    Ok(reply::warned(reply::json(201, &request), &warnings))
}

/// Sets the name of the account in a request without a name. As upstream, the name of another account is refused.
fn set_name(call: &Call, request: &mut Value) -> Result<()> {
    let name = text(request, "name").to_owned();
    if name.is_empty() {
        request["metadata"]["name"] = call.resource.name.clone().into();
    } else if name != call.resource.name {
        let message = format!("Invalid value: {name:?}: must match the service account name if specified");
        let cause = Cause { reason: "FieldValueInvalid", field: "metadata.name".to_owned(), message };
        return Err(ApiError::invalid_parameters("TokenRequest", "authentication.k8s.io", &[cause]));
    }
    Ok(())
}

/// Refuses a request for an earlier account with the same name.
fn check_uid(call: &Call, asked: &str, own: &str) -> Result<()> {
    if asked.is_empty() || asked == own {
        return Ok(());
    }
    let name = &call.resource.name;
    let why = format!(
        "the UID in the token request ({asked}) does not match the UID of the service account ({own})"
    );
    let mut error = ApiError::conflict(&call.kind, name, &why);
    // Upstream names the request, not the account.
    error.message =
        format!("Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"{name}\": {why}");
    error.details = json!({"kind": "TokenRequest", "group": "authentication.k8s.io", "name": name});
    Err(error)
}

/// The extended lifetime in seconds of a pod's token, if [`EXTENDABLE_SECONDS`] is the requested lifetime. `None` if
/// the token is not extended. Only tokens for this server are extended.
fn extended(call: &Call, bound: &Value, audiences: &[String], seconds: i64) -> Option<i64> {
    let tokens = &call.state.authenticators.tokens;
    let is_extended = call.state.extend_tokens
        && seconds == EXTENDABLE_SECONDS
        && bound.get("pod").is_some()
        && audiences.iter().all(|audience| tokens.audiences.contains(audience));
    let most = tokens.keys.max_seconds().unwrap_or(EXTENDED_SECONDS);
    is_extended.then_some(EXTENDED_SECONDS.min(most))
}

/// The claims about the bound object. A node gets tokens for its own pods only, with the audiences that the module
/// `audience` permits.
async fn bound(call: &Call, spec: &Value) -> Result<Value> {
    let reference = &spec["boundObjectRef"];
    let forbidden = |why: String| ApiError::forbidden_object(&call.kind, &call.resource.name, why);
    let node = call.user.node();
    let (resource, claim) = match reference["kind"].as_str() {
        None if node.is_none() => return Ok(json!({})),
        None => return Err(forbidden("node requested token not bound to a pod".to_owned())),
        Some("Pod") => ("pods", "pod"),
        Some("Secret") if node.is_none() => ("secrets", "secret"),
        Some("Node") if node.is_none() => ("nodes", "node"),
        Some(other) => {
            return Err(ApiError::bad_request(format!("cannot bind token for object of type {other}")));
        }
    };
    let kind = by_resource("", "v1", resource).ok_or_else(ApiError::no_resource)?;
    let name = reference["name"].as_str().unwrap_or_default();
    let namespace = if kind.namespaced { call.namespace() } else { "" };
    let object =
        call.state.cache.find(kind, namespace, name)?.ok_or_else(|| ApiError::not_found(kind, name))?;
    let object = object.part(&BOUND_FIELDS);
    let (uid, wanted) = (text(&object, "uid"), reference["uid"].as_str().unwrap_or_default());
    if node.is_some() && wanted.is_empty() {
        return Err(forbidden("node requested token with a pod binding without a uid".to_owned()));
    }
    if !wanted.is_empty() && wanted != uid {
        let why = format!(
            "the UID in the bound object reference ({wanted}) does not match the UID in record. \
             The object might have been deleted and then recreated"
        );
        return Err(ApiError::conflict(kind, name, why));
    }
    let mut claims = json!({claim: {"name": name, "uid": uid}});
    if claim == "pod" {
        let account = object["spec"]["serviceAccountName"].as_str().unwrap_or_default();
        if account != call.resource.name {
            return Err(ApiError::bad_request(format!(
                "cannot bind token for serviceaccount \"{}\" to pod running with different serviceaccount name.",
                call.resource.name
            )));
        }
        let on = object["spec"]["nodeName"].as_str().unwrap_or_default();
        if node.is_some_and(|node| node != on) {
            return Err(forbidden(format!(
                "node requested token bound to a pod scheduled on a different node ({on})"
            )));
        }
        if node.is_some() {
            let pod = TokenPod { namespace, name, pod: &object };
            audience::check(call, &spec["audiences"], pod).await?;
        }
        if !on.is_empty() {
            claims["node"] = node_claim(call, on)?;
        }
    }
    Ok(claims)
}

/// The node of a bound pod. Its uid is absent if the node is not registered.
fn node_claim(call: &Call, name: &str) -> Result<Value> {
    let kind = by_resource("", "v1", "nodes").ok_or_else(ApiError::no_resource)?;
    let node = call.state.cache.get(kind, "", name);
    Ok(match node {
        Some(node) => json!({"name": name, "uid": text(&node.part(&[&["metadata", "uid"]]), "uid")}),
        None => json!({"name": name}),
    })
}
