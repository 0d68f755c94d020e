//! The allocation of a claim, from the chosen devices.

use serde_json::{Value, json};
use uuid::Uuid;

use super::{Allocator, Chosen, is_of_request};
use crate::devices::allocated::DeviceId;
use crate::devices::object::{Claim, Config};
use crate::devices::places::Places;

impl<'a> Allocator<'a> {
    /// The allocation of a claim, as the field `status.allocation`.
    pub(super) fn allocation(&self, claim: &Claim, chosen: &[&Chosen<'a>]) -> Value {
        let result = |one: &&Chosen<'_>| {
            let DeviceId { driver, pool, name: device } = one.candidate.id();
            let mut result =
                json!({"request": one.request, "driver": driver, "pool": pool, "device": device});
            if let Some(admin) = one.exact.admin_access {
                result["adminAccess"] = admin.into();
            }
            if !one.exact.tolerations.is_empty() {
                result["tolerations"] = json!(one.exact.tolerations);
            }
            if one.candidate.device.is_shared() {
                result["shareID"] = Uuid::new_v4().to_string().into();
            }
            let device = one.candidate.device;
            if !device.binding_conditions.is_empty() {
                result["bindingConditions"] = json!(device.binding_conditions);
            }
            if !device.binding_failure_conditions.is_empty() {
                result["bindingFailureConditions"] = json!(device.binding_failure_conditions);
            }
            for consumption in one.consumed.iter() {
                result["consumedCapacity"][consumption.name] = consumption.amount.to_string().into();
            }
            result
        };
        let mut allocation = json!({"devices": {"results": chosen.iter().map(result).collect::<Vec<_>>()}});
        let config = self.config(claim, chosen);
        if !config.is_empty() {
            allocation["devices"]["config"] = config.into();
        }
        if let Some(selector) = self.selector(chosen) {
            allocation["nodeSelector"] = selector;
        }
        allocation
    }

    /// The configuration of the classes, then the configuration of the claim.
    fn config(&self, claim: &Claim, chosen: &[&Chosen<'_>]) -> Vec<Value> {
        let entry = |source: &str, requests: &[&str], config: &Config| json!({"source": source, "requests": requests, "opaque": config.opaque});
        let mut classes: Vec<(&str, Vec<&str>)> = Vec::new();
        for one in chosen {
            let class = one.exact.device_class_name.as_str();
            match classes.iter_mut().find(|(known, _)| *known == class) {
                Some((_, requests)) if requests.contains(&one.request.as_str()) => {}
                Some((_, requests)) => requests.push(&one.request),
                None => classes.push((class, vec![&one.request])),
            }
        }
        let mut found = Vec::new();
        for (class, requests) in classes {
            let config = self.classes.get(class).into_iter().flat_map(|class| &class.spec.config);
            found.extend(config.map(|config| entry("FromClass", &requests, config)));
        }
        for config in &claim.spec.devices.config {
            let is_for =
                |one: &&Chosen<'_>| config.requests.iter().any(|name| is_of_request(name, &one.request));
            if config.requests.is_empty() || chosen.iter().any(is_for) {
                let requests: Vec<&str> = config.requests.iter().map(String::as_str).collect();
                found.push(entry("FromClaim", &requests, config));
            }
        }
        found
    }

    /// The selector of the nodes that can use the devices. `None` means all nodes.
    fn selector(&self, chosen: &[&Chosen<'a>]) -> Option<Value> {
        let places = |one: &Chosen<'a>| Places::of(one.candidate.slice, one.candidate.device);
        let binds = |one: &Chosen<'_>| one.candidate.device.binds_to_node == Some(true);
        if chosen.iter().any(|one| binds(one) || places(one).node.is_some()) {
            let field = json!({"key": "metadata.name", "operator": "In", "values": [self.node.name]});
            return Some(json!({"nodeSelectorTerms": [{"matchFields": [field]}]}));
        }
        let (mut expressions, mut fields) = (Vec::new(), Vec::new());
        for selector in chosen.iter().filter_map(|one| places(one).selector) {
            // Validation allows only one term.
            for term in selector.node_selector_terms.iter().take(1) {
                for expression in term.match_expressions.iter().flatten() {
                    if !expressions.contains(expression) {
                        expressions.push(expression.clone());
                    }
                }
                for field in term.match_fields.iter().flatten() {
                    if !fields.contains(field) {
                        fields.push(field.clone());
                    }
                }
            }
        }
        if expressions.is_empty() && fields.is_empty() {
            return None;
        }
        Some(json!({"nodeSelectorTerms": [{"matchExpressions": expressions, "matchFields": fields}]}))
    }
}
