//! Dispatches a request to its handler by verb and path.

use coracle_kinds::{Resources, kind::built_in};
use futures::future::BoxFuture;
use http::Method;

use crate::{
    audit::Record,
    authz::{self, AccessAttributes},
    call::Call,
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    media,
    reply::{self, Body, Reply},
    state::State,
    sub, usage, verb, web_socket,
    write::Part,
};

/// The response for an unknown path, as upstream: a Status object if the path is below a built-in group, otherwise
/// plain text.
pub(super) fn unknown_path(set: &Resources, path: &str) -> Result<Reply> {
    let mut parts = path.trim_matches('/').split('/');
    let group = match parts.next() {
        Some("api") => parts.next().filter(|version| *version == "v1").map(|_| ""),
        Some("apis") => parts.next(),
        _ => None,
    };
    let is_below = parts.next().is_some_and(|part| !part.is_empty());
    let is_built_in = |group: &str| {
        built_in().iter().any(|kind| kind.group == group) && set.versions_of(group).next().is_some()
    };
    if is_below && group.is_some_and(is_built_in) {
        return Err(ApiError::no_resource());
    }
    Ok(reply::text(404, "404 page not found\n"))
}

/// Authorizes a request, and checks its method.
pub(super) async fn authorize(
    state: &State,
    question: &AccessAttributes<'_>,
    method: &Method,
    record: Option<&Record>,
) -> Result<()> {
    let decision = state.metrics.access.authorization(state.authorizers.decide(question)).await;
    if let Some(record) = record {
        record.decided(&decision);
    }
    decision.permit(question)?;
    check_method(method)?;
    if authz::enters_pod(question.info) {
        // A WebSocket begins with GET. Source: AuthorizePodWebsocketUpgradeCreatePermission, v1.35.
        state.authorizers.authorize(&AccessAttributes { verb: "create", ..*question }).await?;
    }
    Ok(())
}

/// Refuses CONNECT: no path has a route for it, as upstream. The response 200 would mean that a tunnel has begun.
fn check_method(method: &Method) -> Result<()> {
    if *method == Method::CONNECT { Err(ApiError::method_not_allowed()) } else { Ok(()) }
}

/// Checks that the objects of the resource are loaded. Skips the deletion of one object: an ordinary deletion checks
/// this itself, and an unsafe deletion removes objects that cannot be loaded.
pub(super) fn check_readable(call: &Call) -> Result<()> {
    let is_deletion = call.info.verb == "delete" && call.resource.subresource.is_empty();
    if is_deletion { Ok(()) } else { call.state.cache.check_readable(&call.kind) }
}

/// Runs the verb of a request for an object or a collection.
///
/// The future is boxed, because it is large: each layer around it would hold a copy on the stack.
pub(super) fn resource<'a>(
    call: &'a Call,
    method: &'a Method,
    upgrade: ClientUpgrade,
) -> BoxFuture<'a, Result<Reply>> {
    Box::pin(run_verb(call, method, upgrade))
}

async fn run_verb(call: &Call, method: &Method, upgrade: ClientUpgrade) -> Result<Reply> {
    if !has_path(call) {
        return Err(ApiError::no_resource());
    }
    // Upstream has no route for HEAD. The earlier authorization treats HEAD as GET, as upstream.
    if *method == Method::HEAD || !call.kind.has_verb(call.info.verb) {
        return Err(ApiError::method_not_allowed());
    }
    if call.kind.group == usage::GROUP {
        return usage::run(call).await;
    }
    match (&*call.kind.group, &*call.kind.plural) {
        ("", "bindings") => return sub::binding::create(call).await,
        ("", "componentstatuses") => return verb::component_status::run(call),
        _ => {}
    }
    if !call.kind.is_stored() {
        return verb::review::run(call).await;
    }
    if !matches!(call.info.verb, "get" | "list" | "watch") {
        // Refuse a client that accepts no form of the response before anything is changed.
        call.form()?;
    }
    match call.info.verb {
        "get" => verb::get::run(call).await,
        "list" => verb::list::run(call).await,
        "watch" if web_socket::is_upgrade(&call.headers) => verb::watch_socket::run(call, upgrade),
        "watch" => verb::watch::run(call, upgrade.reader()),
        "create" if call.resource.name.is_empty() => verb::create::run(call).await,
        "update" if !call.resource.name.is_empty() => verb::update::run(call, Part::Main).await,
        "patch" if !call.resource.name.is_empty() => verb::patch::run(call, Part::Main).await,
        "delete" => verb::delete::run(call).await,
        "deletecollection" => verb::delete_collection::run(call).await,
        _ => Err(ApiError::method_not_allowed()),
    }
}

/// Whether upstream serves the path with at least one method. A resource that can only be created, such as a binding or
/// a review, has no paths of objects, and no path of all namespaces.
fn has_path(call: &Call) -> bool {
    let has_one_of = |verbs: &[&str]| verbs.iter().any(|verb| call.kind.has_verb(verb));
    if !call.resource.name.is_empty() {
        return has_one_of(&["get", "update", "patch", "delete"]);
    }
    !call.kind.namespaced || !call.resource.namespace.is_empty() || has_one_of(&["list", "watch"])
}

/// Runs the verb of a request for a subresource. `body` is the body of a proxied request. The future is boxed like the
/// future of [`resource`].
pub(super) fn subresource<'a>(
    call: &'a Call,
    method: &'a Method,
    upgrade: ClientUpgrade,
    body: Body,
) -> BoxFuture<'a, Result<Reply>> {
    Box::pin(run_subresource_verb(call, method, upgrade, body))
}

async fn run_subresource_verb(
    call: &Call,
    method: &Method,
    upgrade: ClientUpgrade,
    body: Body,
) -> Result<Reply> {
    let sub = call.resource.subresource.as_str();
    let row = call.kind.subresource(sub).ok_or_else(ApiError::no_resource)?;
    let verb = call.info.verb;
    if sub == "proxy" {
        return sub::proxy::run(call, method, upgrade, body).await;
    }
    if *method == Method::HEAD || !row.verbs.iter().any(|known| known == verb) {
        return Err(ApiError::method_not_allowed());
    }
    if matches!(sub, "binding" | "eviction" | "token") {
        // Responses of these subresources cannot be rendered as tables or partial metadata.
        media::negotiate(&call.headers, &call.info.query, &[])?;
    }
    if matches!(sub, "status" | "ephemeralcontainers" | "resize" | "approval" | "finalize") {
        call.form()?;
    }
    let (group, resource) = (&*call.kind.group, &*call.kind.plural);
    match (group, resource, sub, verb) {
        (_, _, "status", "get") => verb::get::run(call).await,
        (_, _, "status", "update") => verb::update::run(call, Part::Status).await,
        (_, _, "status", "patch") => verb::patch::run(call, Part::Status).await,
        (_, _, "scale", "get") => sub::scale::get(call).await,
        (_, _, "scale", "update") => sub::scale::update(call).await,
        (_, _, "scale", "patch") => sub::scale::patch(call).await,
        ("", "pods", "ephemeralcontainers", "get") => verb::get::run(call).await,
        ("", "pods", "ephemeralcontainers", "update") => {
            verb::update::run(call, Part::EphemeralContainers).await
        }
        ("", "pods", "ephemeralcontainers", "patch") => {
            verb::patch::run(call, Part::EphemeralContainers).await
        }
        ("", "pods", "resize", "get") => verb::get::run(call).await,
        ("", "pods", "resize", "update") => verb::update::run(call, Part::Resize).await,
        ("", "pods", "resize", "patch") => verb::patch::run(call, Part::Resize).await,
        ("certificates.k8s.io", "certificatesigningrequests", "approval", "get") => {
            verb::get::run(call).await
        }
        ("certificates.k8s.io", "certificatesigningrequests", "approval", "update") => {
            verb::update::run(call, Part::Approval).await
        }
        ("certificates.k8s.io", "certificatesigningrequests", "approval", "patch") => {
            verb::patch::run(call, Part::Approval).await
        }
        ("", "pods", "binding", "create") => sub::binding::run(call).await,
        ("", "pods", "eviction", "create") => sub::eviction::run(call).await,
        ("", "pods", "log" | "exec" | "attach" | "portforward", _) => {
            sub::stream::run(call, method, upgrade).await
        }
        ("", "namespaces", "finalize", "update") => sub::finalize::run(call).await,
        ("", "serviceaccounts", "token", "create") => sub::token::run(call).await,
        _ => Err(ApiError::method_not_allowed()),
    }
}
