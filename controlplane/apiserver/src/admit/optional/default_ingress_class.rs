//! Sets the default class of new Ingresses without a class.
//!
//! Source: `plugin/pkg/admission/network/defaultingressclass`.

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::forbidden;
use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
};

const GROUP: &str = "networking.k8s.io";
/// The deprecated annotation that names a class.
const CLASS: &str = "kubernetes.io/ingress.class";
const IS_DEFAULT: &str = "ingressclass.kubernetes.io/is-default-class";

pub(in crate::admit) struct DefaultIngressClass;

#[async_trait]
impl Admit for DefaultIngressClass {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        let creates = attributes.operation == Operation::Create && attributes.subresource.is_empty();
        if !creates || !attributes.kind.is(GROUP, "Ingress") {
            return Ok(());
        }
        let has_class = object["spec"]["ingressClassName"].is_string();
        if has_class || object["metadata"]["annotations"][CLASS].is_string() {
            return Ok(());
        }
        let Some(kind) = by_resource(GROUP, "v1", "ingressclasses") else { return Ok(()) };
        let classes = admission.cache.list(kind, "");
        let mut defaults: Vec<Value> = classes.iter().map(|class| class.value()).filter(is_default).collect();
        // If there are several default classes, the newest applies. If they were created at the same time, the first by
        // name applies.
        defaults.sort_by(|a, b| {
            let time = |class: &Value| class["metadata"]["creationTimestamp"].as_str().map(str::to_owned);
            time(b).cmp(&time(a)).then_with(|| name(a).cmp(name(b)))
        });
        let Some(class) = defaults.first() else { return Ok(()) };
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else {
            return Err(forbidden(attributes, "spec must be an object"));
        };
        spec.insert("ingressClassName".to_owned(), name(class).into());
        Ok(())
    }
}

fn is_default(class: &Value) -> bool {
    class["metadata"]["annotations"][IS_DEFAULT] == "true"
}

fn name(class: &Value) -> &str {
    class["metadata"]["name"].as_str().unwrap_or_default()
}
