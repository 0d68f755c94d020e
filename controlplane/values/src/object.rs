//! Access to the metadata of objects: key, name, namespace, uid, owner.

mod read_metadata;

use std::fmt;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube_core::Resource;

pub use read_metadata::without_managed_fields;

/// Metadata of objects whose kind is known at compile time. The text of an absent field is empty.
pub trait ObjectExt: Resource<DynamicType = ()> {
    /// Namespace and name.
    fn key(&self) -> Key {
        Key::of(self.meta())
    }

    /// The uid. Empty for an object that the API server has not stored yet.
    fn uid(&self) -> &str {
        self.meta().uid.as_deref().unwrap_or_default()
    }

    /// The name.
    fn name(&self) -> &str {
        self.meta().name.as_deref().unwrap_or_default()
    }

    /// The namespace. Empty for cluster-scoped kinds.
    fn namespace(&self) -> &str {
        self.meta().namespace.as_deref().unwrap_or_default()
    }

    /// The value of an annotation.
    fn annotation(&self, name: &str) -> Option<&str> {
        self.meta().annotations.as_ref()?.get(name).map(String::as_str)
    }

    /// Whether the object has a deletion timestamp.
    fn is_being_deleted(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
    }

    /// A reference to the object, as events have it in `involvedObject`.
    fn object_reference(&self) -> ObjectReference {
        let meta = self.meta();
        ObjectReference {
            api_version: Some(Self::api_version(&()).into_owned()),
            kind: Some(Self::kind(&()).into_owned()),
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            field_path: None,
        }
    }

    /// The owner reference for objects that this object controls.
    fn controller_reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: Self::api_version(&()).into_owned(),
            kind: Self::kind(&()).into_owned(),
            name: self.name().to_owned(),
            uid: self.uid().to_owned(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }
}

impl<T: Resource<DynamicType = ()>> ObjectExt for T {}

/// Namespace (empty for cluster-scoped kinds) and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

// === impl Key ===

impl Key {
    /// A key from its two parts.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// The key of an object with this metadata.
    pub fn of(meta: &ObjectMeta) -> Self {
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// The owner reference with `controller: true`. Validation allows at most one such reference.
pub fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// The path of the objects of a resource, in one namespace or in the whole cluster. The `url_path` of
/// [`kube_core::Resource`] would be compiled for each kind.
pub fn url_path(group: &str, version: &str, plural: &str, namespace: Option<&str>) -> String {
    let group = if group.is_empty() { "api".to_owned() } else { format!("apis/{group}") };
    match namespace {
        Some(namespace) => format!("/{group}/{version}/namespaces/{namespace}/{plural}"),
        None => format!("/{group}/{version}/{plural}"),
    }
}

/// Implements [`kube_core::Resource`] for a struct that has a field `metadata: ObjectMeta`.
///
/// It is for structs that keep only the fields that a cache needs. If the version is `v1` and the struct has the name
/// of its kind, the group and the resource are enough: `resource!(Pod, "", "pods", NamespaceResourceScope)`. Other
/// structs need the kind, and the group with the version: `resource!(Autoscaler, "HorizontalPodAutoscaler",
/// ("autoscaling", "v2", "horizontalpodautoscalers"), NamespaceResourceScope)`.
#[macro_export]
macro_rules! resource {
    ($type:ident, $group:literal, $plural:literal, $scope:ident) => {
        $crate::resource!($type, stringify!($type), ($group, "v1", $plural), $scope);
    };
    ($type:ident, $kind:expr, ($group:literal, $version:literal, $plural:literal), $scope:ident) => {
        impl $crate::kube_core::Resource for $type {
            type DynamicType = ();
            type Scope = $crate::kube_core::$scope;

            fn kind((): &()) -> ::std::borrow::Cow<'_, str> {
                $kind.into()
            }
            fn group((): &()) -> ::std::borrow::Cow<'_, str> {
                $group.into()
            }
            fn version((): &()) -> ::std::borrow::Cow<'_, str> {
                $version.into()
            }
            fn plural((): &()) -> ::std::borrow::Cow<'_, str> {
                $plural.into()
            }
            fn url_path((): &(), namespace: Option<&str>) -> ::std::string::String {
                $crate::object::url_path($group, $version, $plural, namespace)
            }
            fn meta(&self) -> &::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;

    use super::*;

    #[derive(Default)]
    struct Deployment {
        metadata: ObjectMeta,
    }
    crate::resource!(Deployment, "apps", "deployments", NamespaceResourceScope);

    struct Group {
        metadata: ObjectMeta,
    }
    crate::resource!(
        Group,
        "PodGroup",
        ("scheduling.k8s.io", "v1alpha2", "podgroups"),
        NamespaceResourceScope
    );

    #[test]
    fn a_reduced_type_may_have_another_name_and_version() {
        assert_eq!((&*Group::kind(&()), &*Group::plural(&())), ("PodGroup", "podgroups"));
        assert_eq!(Group::api_version(&()), "scheduling.k8s.io/v1alpha2");
        assert_eq!(Group::url_path(&(), None), "/apis/scheduling.k8s.io/v1alpha2/podgroups");
        assert_eq!(
            Deployment::url_path(&(), Some("n")),
            k8s_openapi::api::apps::v1::Deployment::url_path(&(), Some("n"))
        );
        assert_eq!(url_path("", "v1", "nodes", None), Node::url_path(&(), None));
        assert_eq!((&*Deployment::kind(&()), &*Deployment::version(&())), ("Deployment", "v1"));
        let group = Group { metadata: ObjectMeta { name: Some("g".to_owned()), ..ObjectMeta::default() } };
        assert_eq!(group.name(), "g");
    }

    #[test]
    fn metadata_of_full_and_of_reduced_types_reads_the_same() {
        let metadata = json!({"name": "d", "namespace": "n", "uid": "u", "resourceVersion": "7"});
        let deployment = Deployment { metadata: serde_json::from_value(metadata).unwrap() };
        assert_eq!((deployment.key().to_string().as_str(), deployment.uid()), ("n/d", "u"));
        assert!(!deployment.is_being_deleted());
        let reference = deployment.object_reference();
        assert_eq!(
            (reference.api_version.as_deref(), reference.kind.as_deref()),
            (Some("apps/v1"), Some("Deployment"))
        );
        assert_eq!(reference.resource_version.as_deref(), Some("7"));
        let owner = deployment.controller_reference();
        assert_eq!((owner.name.as_str(), owner.uid.as_str()), ("d", "u"));
        let owned = ObjectMeta { owner_references: Some(vec![owner.clone()]), ..ObjectMeta::default() };
        assert_eq!(controller_of(&owned), Some(&owner));
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "a"}})).unwrap();
        assert_eq!((node.key().to_string().as_str(), node.namespace(), node.uid()), ("a", "", ""));
    }
}
