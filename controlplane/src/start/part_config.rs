//! Configurations of the API server and of the controllers, from the configuration of the control plane.

use std::net::SocketAddr;

use coracle_apiserver::{ApiserverConfig, FrontProxy, KubeletTls, ServiceRanges};
use coracle_controllers::{AccountTokenSigner, ControllersConfig, Signer};
use ipnetwork::IpNetwork;

use crate::config::ControlPlaneConfig;
use crate::error::Error;
use crate::pki::{Leaf, Pki, PkiError};
use crate::tls;

/// DNS domain of the issuer of service account tokens.
const DOMAIN: &str = "cluster.local";

pub(super) fn service_ranges(config: &ControlPlaneConfig) -> ServiceRanges {
    ServiceRanges::new(config.service_cidr, config.secondary_service_cidr)
}

/// The ranges of pods and services.
pub(super) fn reserved_ranges(config: &ControlPlaneConfig) -> Vec<IpNetwork> {
    let services = [config.service_cidr].into_iter().chain(config.secondary_service_cidr);
    config.cluster_cidrs.iter().copied().chain(services).collect()
}

pub(super) fn apiserver_config(
    config: &ControlPlaneConfig,
    pki: &Pki,
    address: SocketAddr,
) -> Result<ApiserverConfig, Error> {
    let leaf = Leaf::client("kube-apiserver-kubelet-client", Some("system:masters"));
    let pair = pki.pair("apiserver-kubelet-client", &leaf).map_err(Error::Pki)?;
    Ok(ApiserverConfig {
        advertise: address,
        service_ranges: service_ranges(config),
        service_account_key: pki.service_account_key().map_err(Error::Pki)?,
        token_signer: None,
        issuer: format!("https://kubernetes.default.svc.{DOMAIN}"),
        password_file: config.password_file.clone(),
        token_file: config.token_file.clone(),
        authentication_file: config.authentication_file.clone(),
        oidc: config.oidc.clone(),
        token_webhook: config.token_webhook.clone(),
        request_header: config.request_header.clone(),
        anonymous_auth: config.anonymous_auth,
        authorization: config.authorization.clone(),
        kubelet: KubeletTls(tls::client(&pair, pki.authority_pem()).map_err(Error::Tls)?),
        admission_file: config.admission_file.clone(),
        admission_plugins: config.admission_plugins.clone(),
        initial_resources: config.initial_resources,
        runtime_config: config.runtime_config.clone(),
        features: config.features,
        options: config.options.clone(),
        audit: config.audit.clone(),
        front_proxy: front_proxy(pki).map_err(Error::Pki)?,
        request_timeout: config.request_timeout,
        max_in_flight: config.max_in_flight,
        flags: config.flags.clone(),
        component_metrics: None,
        encryption_health: None,
        own_components: own_components(config),
        shutdown_delay: config.shutdown_delay,
    })
}

/// The parts of the control plane that run in this process, by the names of component statuses.
fn own_components(config: &ControlPlaneConfig) -> Vec<&'static str> {
    let parts = [("controller-manager", !config.controllers.is_none()), ("scheduler", config.run_scheduler)];
    parts.into_iter().filter(|(_, runs)| *runs).map(|(name, _)| name).collect()
}

/// The client certificate for requests to aggregated servers. Its authority signs no other certificate, because a
/// server that trusts the authority accepts any user name in the request headers.
fn front_proxy(pki: &Pki) -> Result<FrontProxy, PkiError> {
    let own = Pki::open(&pki.directory().join("front-proxy"))?;
    let pair = own.pair("front-proxy-client", &Leaf::client("front-proxy-client", None))?;
    Ok(FrontProxy {
        certificate: pair.certificate,
        key: pair.key,
        authority: own.authority_pem().to_owned(),
        client_authority: pki.authority_pem().to_owned(),
    })
}

pub(super) fn controllers_config(
    config: &ControlPlaneConfig,
    pki: &Pki,
    address: SocketAddr,
    leaf: Leaf,
) -> Result<ControllersConfig, Error> {
    let key = pki.authority_key().map_err(Error::Pki)?;
    let signer = Signer::new(pki.authority_pem(), &key, config.signing_duration).map_err(Error::Signer)?;
    // An API server with an external signer does not accept tokens that are signed with its own key.
    let own_key = config.token_signer.is_none().then(|| pki.service_account_key().map_err(Error::Pki));
    let account_tokens = own_key.transpose()?.and_then(|key| AccountTokenSigner::new(&key));
    Ok(ControllersConfig {
        // The API server writes the status of quotas itself.
        selection: config.controllers.clone().never("resourcequota-controller"),
        cluster_cidrs: config.cluster_cidrs.clone(),
        node_mask_v4: config.node_masks[0],
        node_mask_v6: config.node_masks[1],
        root_ca_pem: Some(pki.authority_pem().to_owned()),
        account_tokens,
        token_clean_up_period: config.token_clean_up_period,
        server: Some(format!("https://{address}")),
        reserved_ranges: reserved_ranges(config),
        server_names: leaf.names,
        server_addresses: leaf.addresses,
        own_node: config.own_node.clone(),
        signer: Some(signer),
        node_balancers: config.node_balancers,
        node_ports: config.options.node_ports.clone(),
        max_finished_pods: config.max_finished_pods,
        load_balancer_pool: config.load_balancer_pool.clone(),
        node_monitor_grace: config.node_monitor_grace,
        autoscaler: config.autoscaler,
        ..ControllersConfig::default()
    })
}
