//! POST of a review: a question about a user's identity or permissions. It is not stored.

use coracle_kinds::validate;
use coracle_values::{CollectMap, string_list};
use serde_json::{Value, json};

use crate::{
    admit::Operation,
    authn::User,
    authz::{AccessAttributes, RulesScope, Verdict, rbac::rule::Rule, selectors},
    call::Call,
    error::{ApiError, Result},
    media, offload,
    reply::{self, Reply},
    request::{RequestInfo, ResourceInfo},
};

/// Maximum number of audiences of a token review.
const MAX_AUDIENCES: usize = 32;
/// Maximum bytes of the token of a review. It equals the limit on the headers of an HTTP/2 request. The authenticators
/// decode tokens on the async workers.
const MAX_TOKEN_BYTES: usize = 64 << 10;

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    // Reviews cannot be rendered as a table.
    media::negotiate(&call.headers, &call.info.query, &[])?;
    let (mut review, warnings) = call.object().await?;
    super::create::set_namespace(call, &mut review)?;
    remove_system_fields(&mut review);
    let attributes = call.attributes(Operation::Create, "", None);
    call.state.admission.mutate_review(&attributes, &mut review).await?;
    check(call, &review)?;
    call.state.admission.validate_review(&attributes, &review).await?;
    review["status"] = match &*call.kind.kind {
        "SelfSubjectReview" => json!({"userInfo": user_info(&call.user)}),
        "SelfSubjectAccessReview" => access(call, &call.user, &review["spec"]).await,
        "SubjectAccessReview" | "LocalSubjectAccessReview" => {
            access(call, &subject(&review["spec"]), &review["spec"]).await
        }
        "SelfSubjectRulesReview" => rules(call, review["spec"]["namespace"].as_str().unwrap_or_default()),
        "TokenReview" => token(call, &review["spec"]).await,
        _ => return Err(ApiError::method_not_allowed()),
    };
    let reply = offload::run(call.has_large_body(), || reply::json(201, &answer(review)));
    Ok(reply::warned(reply, &warnings))
}

/// Removes the metadata that only the server sets. A review is not stored, so it gets no such metadata.
fn remove_system_fields(review: &mut Value) {
    let Some(metadata) = crate::write::metadata_mut(review) else { return };
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "selfLink",
        "managedFields",
    ] {
        metadata.remove(field);
    }
}

/// The body of the response. `review` has its status. Responses to SelfSubjectReview and SelfSubjectRulesReview repeat
/// no field of the request. Source: `Create` of their `REST` types.
fn answer(review: Value) -> Value {
    let mut answer =
        json!({"apiVersion": review["apiVersion"], "kind": review["kind"], "status": review["status"]});
    match review["kind"].as_str() {
        Some("SelfSubjectReview") => {
            answer["metadata"] = json!({"creationTimestamp": crate::write::now()});
            answer
        }
        Some("SelfSubjectRulesReview") => {
            answer["metadata"] = json!({});
            answer["spec"] = json!({});
            answer
        }
        _ => review,
    }
}

/// Refuses a review without exactly one kind of attributes, or with attributes that its kind does not support.
fn check(call: &Call, review: &Value) -> Result<()> {
    let kind = &*call.kind.kind;
    let causes = validate::review(kind, review, call.namespace());
    if !causes.is_empty() {
        return Err(ApiError::invalid(&call.kind, "", &causes));
    }
    if kind == "TokenReview" && review["spec"]["token"].as_str().unwrap_or_default().is_empty() {
        return Err(ApiError::bad_request("token is required for TokenReview in authentication"));
    }
    if kind == "SelfSubjectRulesReview" && review["spec"]["namespace"].as_str().unwrap_or_default().is_empty()
    {
        return Err(ApiError::bad_request("no namespace on request"));
    }
    Ok(())
}

fn user_info(user: &User) -> Value {
    let mut value = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        value["uid"] = user.uid.clone().into();
    }
    if !user.extra.is_empty() {
        value["extra"] = json!(user.extra);
    }
    value
}

/// The user in the spec of a review, unchanged.
fn subject(spec: &Value) -> User {
    let texts = |list: &Value| string_list::texts(list).map(str::to_owned).collect::<Vec<_>>();
    let extra = spec["extra"].as_object().into_iter().flatten();
    User {
        name: spec["user"].as_str().unwrap_or_default().to_owned(),
        uid: spec["uid"].as_str().unwrap_or_default().to_owned(),
        groups: texts(&spec["groups"]),
        extra: extra.map(|(key, values)| (key.clone(), texts(values))).collect_map(),
        ..User::default()
    }
}

async fn access(call: &Call, user: &User, spec: &Value) -> Value {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (resource, path) = (&spec["resourceAttributes"], &spec["nonResourceAttributes"]);
    let wanted = if resource.is_object() { text(&resource["verb"]) } else { text(&path["verb"]) };
    let info = RequestInfo {
        verb: "",
        path: text(&path["path"]),
        query: selectors::of_review(resource),
        resource: resource.is_object().then(|| ResourceInfo {
            group: text(&resource["group"]),
            version: text(&resource["version"]),
            namespace: text(&resource["namespace"]),
            resource: text(&resource["resource"]),
            name: text(&resource["name"]),
            subresource: text(&resource["subresource"]),
            ..ResourceInfo::default()
        }),
    };
    let question = AccessAttributes { user, verb: &wanted, info: &info, cache: &call.state.cache };
    let decision = call.state.authorizers.decide(&question).await;
    let mut status = match decision.verdict {
        Verdict::Allow => json!({"allowed": true}),
        Verdict::Deny => json!({"allowed": false, "denied": true}),
        Verdict::NoOpinion => json!({"allowed": false}),
    };
    if !decision.reason.is_empty() {
        status["reason"] = decision.reason.into();
    }
    status
}

/// The rules that the user has in a namespace. The list is incomplete if an authorizer cannot list its rules.
fn rules(call: &Call, namespace: &str) -> Value {
    let scope = RulesScope { user: &call.user, namespace, cache: &call.state.cache };
    let found = call.state.authorizers.rules(&scope);
    let (urls, resources): (Vec<_>, Vec<_>) = found.rules.iter().partition(|rule| !rule.urls.is_empty());
    let list = |rules: Vec<&Rule>| rules.into_iter().map(Rule::json).collect::<Vec<_>>();
    let incomplete = found.is_cut || !found.unlisted.is_empty();
    let mut status =
        json!({"resourceRules": list(resources), "nonResourceRules": list(urls), "incomplete": incomplete});
    if incomplete {
        let all = found
            .unlisted
            .iter()
            .map(|name| format!("{name} authorizer does not support user rule resolution"));
        let cut = found.is_cut.then(|| "the user has too many rules to list".to_owned());
        let all: Vec<String> = all.chain(cut).collect();
        status["evaluationError"] =
            if let [one] = all.as_slice() { one.clone() } else { format!("[{}]", all.join(", ")) }.into();
    }
    status
}

async fn token(call: &Call, spec: &Value) -> Value {
    let state = &call.state;
    let token = spec["token"].as_str().unwrap_or_default();
    if token.len() > MAX_TOKEN_BYTES {
        return json!({"user": {}, "error": format!("the token has more than {MAX_TOKEN_BYTES} bytes")});
    }
    let asked = spec["audiences"].as_array().into_iter().flatten();
    let asked: Vec<String> = asked.filter_map(Value::as_str).map(str::to_owned).collect();
    let own = &state.authenticators.tokens.audiences;
    let mut audiences = if asked.is_empty() { own.clone() } else { asked };
    if audiences.len() > MAX_AUDIENCES {
        return json!({"user": {}, "error": format!("more than {MAX_AUDIENCES} audiences")});
    }
    match state.authenticators.token_user(&state.cache, token, &audiences).await {
        Some(user) => {
            // The client trusts each audience in the response.
            let accepted = if user.audiences.is_empty() { own } else { &user.audiences };
            audiences.retain(|audience| accepted.contains(audience));
            json!({"authenticated": true, "user": user_info(&user), "audiences": audiences})
        }
        None => {
            json!({"user": {}, "error": "invalid bearer token"})
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn a_review_has_no_system_fields() {
        let metadata = json!({"name": "a", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [],
            "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 1, "selfLink": "/"});
        let mut review = json!({"kind": "TokenReview", "metadata": metadata});
        super::remove_system_fields(&mut review);
        assert_eq!(review["metadata"], json!({"name": "a"}));
    }

    #[test]
    fn reviews_of_the_own_user_repeat_nothing() {
        let review = |kind: &str| {
            super::answer(json!({"apiVersion": "g/v1", "kind": kind, "metadata": {"name": "a"},
                "spec": {"namespace": "n"}, "status": {"x": 1}}))
        };
        let own = review("SelfSubjectReview");
        assert!(own["metadata"]["creationTimestamp"].is_string() && own["metadata"]["name"].is_null());
        assert_eq!((&own["spec"], &own["status"]), (&json!(null), &json!({"x": 1})));
        assert_eq!(
            review("SelfSubjectRulesReview"),
            json!({"apiVersion": "g/v1", "kind": "SelfSubjectRulesReview", "metadata": {}, "spec": {}, "status": {"x": 1}})
        );
        assert_eq!(review("TokenReview")["metadata"], json!({"name": "a"}));
    }

    #[test]
    fn reviews_are_in_the_table_and_not_stored() {
        let kind = "selfsubjectaccessreviews";
        let kind = coracle_kinds::kind::by_resource("authorization.k8s.io", "v1", kind).unwrap();
        assert!(!kind.is_stored());
    }
}
