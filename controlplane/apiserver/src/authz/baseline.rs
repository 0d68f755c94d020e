//! Everybody may ask for health and version, everybody known for discovery and for what they are.

use super::Question;

pub(super) fn allows(question: &Question<'_>) -> bool {
    let info = question.info;
    if let Some(resource) = &info.resource {
        let about_oneself = resource.resource.starts_with("selfsubject")
            && matches!(resource.group.as_str(), "authentication.k8s.io" | "authorization.k8s.io");
        return about_oneself && info.verb == "create" && question.user.is_in("system:authenticated");
    }
    if !matches!(info.verb, "get" | "head") {
        return false;
    }
    let path = info.path.trim_end_matches('/');
    let under =
        |root: &str| path == root || path.strip_prefix(root).is_some_and(|rest| rest.starts_with('/'));
    let public = ["/healthz", "/livez", "/readyz"].into_iter().any(under) || path == "/version";
    let discovery = ["/api", "/apis", "/openapi"].into_iter().any(under);
    let issuer = ["/.well-known/openid-configuration", "/openid/v1/jwks"].contains(&path);
    public || ((discovery || issuer) && question.user.is_in("system:authenticated"))
}
