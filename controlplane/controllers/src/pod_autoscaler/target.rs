//! The scale of an autoscaler's target: an object of any kind with the subresource `scale`.

use coracle_events::cause;
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::autoscaling::v2::CrossVersionObjectReference;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use kube::{Api, Client};
use serde_json::json;

/// The target of one autoscaler.
pub(super) struct Target {
    api: Api<DynamicObject>,
    name: String,
}

/// The resource of a kind, from the discovery document of its version.
pub(super) async fn resource_of(client: &Client, version: &str, kind: &str) -> Result<ApiResource, String> {
    if !is_group_version(version) {
        return Err(format!("unexpected GroupVersion string: {version}"));
    }
    let listed = if version.contains('/') {
        client.list_api_group_resources(version).await
    } else {
        client.list_core_api_resources(version).await
    };
    let listed = listed.map_err(|error| cause(&error))?;
    let (group, short) = version.split_once('/').unwrap_or(("", version));
    let found = listed.resources.into_iter().find(|one| one.kind == kind && !one.name.contains('/'));
    let found = found.ok_or_else(|| format!("no matches for kind \"{kind}\" in version \"{version}\""))?;
    Ok(ApiResource {
        group: group.to_owned(),
        version: short.to_owned(),
        api_version: version.to_owned(),
        kind: kind.to_owned(),
        plural: found.name,
    })
}

/// Whether a text is `version` or `group/version`. It becomes part of a path that is read with the controller's
/// permissions.
fn is_group_version(text: &str) -> bool {
    let is_name = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    text.split('/').count() <= 2 && text.split('/').all(is_name)
}

impl Target {
    /// Finds the target's resource.
    pub(super) async fn find(
        client: &Client,
        namespace: &str,
        target: &CrossVersionObjectReference,
    ) -> Result<Self, String> {
        // The name becomes one segment of a path, so it must not change the path.
        if target.name.is_empty()
            || matches!(target.name.as_str(), "." | "..")
            || target.name.contains(['/', '%', '?', '#'])
        {
            return Err(format!("invalid name of the scale target: \"{}\"", target.name));
        }
        let version = target.api_version.as_deref().unwrap_or("v1");
        let resource = resource_of(client, version, &target.kind).await?;
        let api = Api::namespaced_with(client.clone(), namespace, &resource);
        Ok(Self { api, name: target.name.clone() })
    }

    /// Reads the scale.
    pub(super) async fn scale(&self) -> Result<Scale, String> {
        self.api.get_scale(&self.name).await.map_err(|error| cause(&error))
    }

    /// Sets the replicas. The patch has no resourceVersion, because it writes no other field.
    pub(super) async fn set(&self, replicas: i32) -> Result<(), String> {
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let patched = self.api.patch_scale(&self.name, &PatchParams::default(), &patch).await;
        patched.map(drop).map_err(|error| cause(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_cannot_contain_another_part_of_a_url() {
        for good in ["v1", "apps/v1", "metrics.k8s.io/v1beta1"] {
            assert!(is_group_version(good), "{good}");
        }
        for bad in [
            "",
            "/",
            "apps/",
            "../v1",
            "a/b/c",
            "/v1",
            "v1?watch=1",
            "events.k8s.io/v1/events?watch=true",
            "v1%2f",
        ] {
            assert!(!is_group_version(bad), "{bad}");
        }
    }
}
