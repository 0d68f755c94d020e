//! OwnerReferencesPermissionEnforcement: changing an object's owners requires the permission to delete the object. An
//! owner reference with `blockOwnerDeletion` requires the permission to change the owner's finalizers.
//!
//! Source: `plugin/pkg/admission/gc`.

use async_trait::async_trait;
use serde_json::Value;

use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
    request::ResourceInfo,
};

pub(in crate::admit) struct OwnerReferences;

#[async_trait]
impl Admit for OwnerReferences {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let writes = matches!(attributes.operation, Operation::Create | Operation::Update);
        let old = attributes.old.map_or(&Value::Null, owners);
        if !writes || owners(object) == old {
            return Ok(());
        }
        if attributes.operation == Operation::Update {
            let own = ResourceInfo {
                group: attributes.kind.group.clone().into_owned(),
                version: attributes.kind.version.clone().into_owned(),
                namespace: attributes.namespace.to_owned(),
                resource: attributes.kind.plural.clone().into_owned(),
                name: attributes.name.to_owned(),
                ..ResourceInfo::default()
            };
            if let Err(error) = admission.authorize_also(attributes.user, "delete", own).await {
                let why = format!("cannot set an ownerRef on a resource you can't delete: {}", error.message);
                return Err(forbidden(attributes, why));
            }
        }
        for owner in
            blocking(object).filter(|owner| !blocking_in(old).any(|other| other["uid"] == owner["uid"]))
        {
            may_block(admission, attributes, owner).await?;
        }
        Ok(())
    }
}

fn owners(object: &Value) -> &Value {
    &object["metadata"]["ownerReferences"]
}

fn blocking(object: &Value) -> impl Iterator<Item = &Value> {
    blocking_in(owners(object))
}

fn blocking_in(owners: &Value) -> impl Iterator<Item = &Value> {
    owners.as_array().into_iter().flatten().filter(|owner| owner["blockOwnerDeletion"] == true)
}

async fn may_block(admission: &Admission, attributes: &Attributes<'_>, owner: &Value) -> Result<()> {
    let text = |field: &str| owner[field].as_str().unwrap_or_default();
    let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
    let resource = admission.registry.load().find_kind(group, version, text("kind")).cloned();
    let Some(resource) = resource else {
        let why = format!(
            "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion {} Kind {}",
            text("apiVersion"),
            text("kind")
        );
        return Err(forbidden(attributes, why));
    };
    let finalizers = ResourceInfo {
        group: group.to_owned(),
        version: version.to_owned(),
        namespace: if resource.namespaced { attributes.namespace.to_owned() } else { String::new() },
        resource: resource.plural.clone().into_owned(),
        name: text("name").to_owned(),
        subresource: "finalizers".to_owned(),
        ..ResourceInfo::default()
    };
    admission.authorize_also(attributes.user, "update", finalizers).await.map_err(|error| {
        let why = format!(
            "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on: {}",
            error.message
        );
        forbidden(attributes, why)
    })
}
