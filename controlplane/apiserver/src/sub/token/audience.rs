//! Checks the audience of a token that a node requests for a pod. The pod's volumes must need tokens for the audience,
//! or the node must have the permission for it.
//!
//! Source: `validateNodeServiceAccountAudience` of the plugin NodeRestriction.

use coracle_kinds::kind::by_resource;
use serde_json::Value;

use crate::{
    cache::Cache,
    call::Call,
    error::{ApiError, Result},
    pod_references::claims_of,
    request::ResourceInfo,
};

/// Verb of the permission for an audience. The audience is the resource, the service account is the name.
const VERB: &str = "request-serviceaccounts-token-audience";

/// A pod for whose service account a token is requested.
#[derive(Clone, Copy)]
pub(super) struct TokenPod<'a> {
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    /// The pod, at least its volumes.
    pub(super) pod: &'a Value,
}

/// Checks the audiences in a request of a node. An absent audience stands for the API server.
pub(super) async fn check(call: &Call, asked: &Value, pod: TokenPod<'_>) -> Result<()> {
    let refused = |why: String| Err(ApiError::forbidden_object(&call.kind, &call.resource.name, why));
    let audience = match asked.as_array().map(Vec::as_slice) {
        None | Some([]) => "",
        Some([one]) => one.as_str().unwrap_or_default(),
        Some(_) => return refused("node may only request 0 or 1 audiences".to_owned()),
    };
    if is_needed(&call.state.cache, pod, audience) || is_permitted(call, audience).await {
        return Ok(());
    }
    refused(format!(
        "audience {audience:?} not found in pod spec volume, {} is not authorized to request tokens for this audience",
        call.user.name
    ))
}

/// Whether the user has the permission for the audience.
async fn is_permitted(call: &Call, audience: &str) -> bool {
    let resource = ResourceInfo {
        version: "v1".to_owned(),
        namespace: call.namespace().to_owned(),
        resource: audience.to_owned(),
        name: call.resource.name.clone(),
        ..ResourceInfo::default()
    };
    let authorizers = &call.state.authorizers;
    authorizers.authorize_also(&call.state.cache, &call.user, VERB, resource).await.is_ok()
}

/// Whether a volume of the pod needs tokens for the audience: a projected volume, or a volume of a CSI driver.
fn is_needed(cache: &Cache, pod: TokenPod<'_>, audience: &str) -> bool {
    let has = |token: &Value| token["audience"].as_str().unwrap_or_default() == audience;
    let volumes = || items(&pod.pod["spec"]["volumes"]);
    let mut tokens = volumes()
        .flat_map(|volume| items(&volume["projected"]["sources"]))
        .map(|source| &source["serviceAccountToken"])
        .filter(|token| token.is_object());
    if tokens.any(has) {
        return true;
    }
    let inline = volumes().filter_map(|volume| volume["csi"]["driver"].as_str()).map(str::to_owned);
    let claims = claims_of(pod.pod, pod.name).into_iter();
    let mut drivers = inline.chain(claims.filter_map(|claim| driver_of(cache, pod.namespace, &claim)));
    drivers.any(|driver| {
        let kind = by_resource("storage.k8s.io", "v1", "csidrivers");
        let driver = kind.and_then(|kind| cache.get(kind, "", &driver));
        driver.is_some_and(|driver| {
            items(&driver.part(&[&["spec", "tokenRequests"]])["spec"]["tokenRequests"]).any(has)
        })
    })
}

/// The CSI driver of the volume of a claim.
fn driver_of(cache: &Cache, namespace: &str, claim: &str) -> Option<String> {
    let claim = cache.get(by_resource("", "v1", "persistentvolumeclaims")?, namespace, claim)?;
    let claim = claim.part(&[&["spec", "volumeName"]]);
    let volume = claim["spec"]["volumeName"].as_str()?;
    let volume = cache.get(by_resource("", "v1", "persistentvolumes")?, "", volume)?;
    let volume = volume.part(&[&["spec", "csi"]]);
    volume["spec"]["csi"]["driver"].as_str().map(str::to_owned)
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use coracle_store::Commit;
    use serde_json::json;

    use super::*;
    use crate::cache::{encode, key_of};

    fn needs(cache: &Cache, volumes: Value, audience: &str) -> bool {
        let pod = json!({"spec": {"volumes": volumes}});
        is_needed(cache, TokenPod { namespace: "ns", name: "p", pod: &pod }, audience)
    }

    #[test]
    fn projected_volumes_name_their_audiences() {
        let cache = Cache::new(0);
        let source = |token: Value| json!({"projected": {"sources": [{"serviceAccountToken": token}]}});
        let volumes =
            json!([{"emptyDir": {}}, source(json!({"path": "t"})), source(json!({"audience": "vault"}))]);
        for (audience, expect) in [("", true), ("vault", true), ("cloud", false)] {
            assert_eq!(needs(&cache, volumes.clone(), audience), expect, "{audience}");
        }
        assert!(!needs(&cache, json!([]), ""));
    }

    #[test]
    fn drivers_of_volumes_and_claims_request_tokens() {
        let cache = Cache::new(0);
        let driver =
            json!({"metadata": {"name": "csi.example"}, "spec": {"tokenRequests": [{"audience": "cloud"}]}});
        let volume = json!({"metadata": {"name": "v"}, "spec": {"csi": {"driver": "csi.example"}}});
        let claim =
            |name: &str| json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"volumeName": "v"}});
        for (revision, group, plural, namespace, object) in [
            (1, "storage.k8s.io", "csidrivers", "", driver),
            (2, "", "persistentvolumes", "", volume),
            (3, "", "persistentvolumeclaims", "ns", claim("c")),
            (4, "", "persistentvolumeclaims", "ns", claim("p-e")),
        ] {
            let kind = by_resource(group, "v1", plural).unwrap();
            let key = key_of(kind, namespace, object["metadata"]["name"].as_str().unwrap()).into();
            let value = Some(encode(kind, &object));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        for (volume, expect) in [
            (json!({"name": "a", "csi": {"driver": "csi.example"}}), true),
            (json!({"name": "a", "csi": {"driver": "other.example"}}), false),
            (json!({"name": "a", "persistentVolumeClaim": {"claimName": "c"}}), true),
            (json!({"name": "a", "persistentVolumeClaim": {"claimName": "other"}}), false),
            (json!({"name": "e", "ephemeral": {"volumeClaimTemplate": {}}}), true),
            (json!({"name": "f", "ephemeral": {"volumeClaimTemplate": {}}}), false),
        ] {
            assert_eq!(needs(&cache, json!([volume]), "cloud"), expect, "{volume}");
            assert!(!needs(&cache, json!([volume]), "vault"), "{volume}");
        }
    }
}
