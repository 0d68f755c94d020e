//! The scale of an object of any kind with the subresource `scale`.

use coracle_events::cause;
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::autoscaling::v2::CrossVersionObjectReference;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::json;

use crate::error::{is_missing, is_not_found};

/// Maximum number of further versions of a group in which a kind is searched.
const MAX_VERSIONS: usize = 10;

/// One object with a scale.
pub(crate) struct Target {
    api: Api<DynamicObject>,
    resource: ApiResource,
    name: String,
}

/// The discovery document of a group.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Group {
    preferred_version: Option<GroupVersion>,
    #[serde(default)]
    versions: Vec<GroupVersion>,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

impl Group {
    /// Reads the document of a group.
    pub(crate) async fn read(client: &Client, name: &str) -> Result<Self, kube::Error> {
        let request = http::Request::get(format!("/apis/{name}")).body(Vec::new());
        client.request(request.map_err(kube::Error::HttpError)?).await
    }

    /// The served versions, the preferred version first.
    pub(crate) fn versions(&self) -> impl Iterator<Item = &str> {
        self.preferred_version.iter().chain(&self.versions).map(|one| one.version.as_str())
    }
}

/// The resource of a kind, from the discovery document of its version. As upstream, group and kind choose the resource:
/// a reference with a version that is no longer served means another version of the group.
pub(crate) async fn resource_of(client: &Client, version: &str, kind: &str) -> Result<ApiResource, String> {
    if !is_group_version(version) {
        return Err(format!("unexpected GroupVersion string: {version}"));
    }
    let error = match resource_in(client, version, kind).await {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    let Some((group, _)) = version.split_once('/') else { return Err(error) };
    let Ok(served) = Group::read(client, group).await else { return Err(error) };
    for other in served.versions().take(MAX_VERSIONS) {
        let other = format!("{group}/{other}");
        if other != version
            && is_group_version(&other)
            && let Ok(found) = resource_in(client, &other, kind).await
        {
            return Ok(found);
        }
    }
    Err(error)
}

/// The resource of a kind in one version of its group.
async fn resource_in(client: &Client, version: &str, kind: &str) -> Result<ApiResource, String> {
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
    pub(crate) async fn find(
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
        Ok(Self { api, resource, name: target.name.clone() })
    }

    /// Reads the scale.
    pub(crate) async fn scale(&self) -> Result<Scale, String> {
        self.api.get_scale(&self.name).await.map_err(|error| cause(&error))
    }

    /// Reads the scale. `None` if the object does not exist.
    ///
    /// # Errors
    /// As upstream, if the resource has no scale, or if the request fails.
    pub(crate) async fn scale_if_found(&self) -> Result<Option<Scale>, String> {
        match self.api.get_scale(&self.name).await {
            Ok(scale) => Ok(Some(scale)),
            Err(error) if is_missing(&error, &self.name) => Ok(None),
            Err(error) if is_not_found(&error) => {
                let ApiResource { plural, group, .. } = &self.resource;
                let dot = if group.is_empty() { "" } else { "." };
                Err(format!("{plural}{dot}{group} does not implement the scale subresource"))
            }
            Err(error) => Err(cause(&error)),
        }
    }

    /// Sets the replicas. The patch has no resourceVersion, because it writes no other field.
    pub(crate) async fn set(&self, replicas: i32) -> Result<(), String> {
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let patched = self.api.patch_scale(&self.name, &PatchParams::default(), &patch).await;
        patched.map(drop).map_err(|error| cause(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_reference_with_a_former_version_means_the_served_one() {
        let versions = json!({"versions": [{"version": "v1beta3"}, {"version": "v1"}]});
        let deployments = json!({"name": "deployments", "singularName": "deployment", "namespaced": true,
            "kind": "Deployment", "verbs": ["get"]});
        let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "apps/v1",
            "resources": [deployments]});
        let api = TestApi::new(&[("/apis/apps", versions), ("/apis/apps/v1", list)]);
        for version in ["apps/v1", "apps/v1beta2"] {
            let found = resource_of(&api.context.client, version, "Deployment").await.unwrap();
            assert_eq!((found.api_version.as_str(), found.plural.as_str()), ("apps/v1", "deployments"));
        }
        assert!(resource_of(&api.context.client, "apps/v1", "Other").await.is_err());
        assert!(resource_of(&api.context.client, "extensions/v1beta1", "Deployment").await.is_err());
    }

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
