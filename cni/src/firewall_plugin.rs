//! The `firewall` plugin: isolates the sandboxes of one bridge from the sandboxes of other bridges, in the table of
//! this crate.

use serde::Deserialize;

use crate::error::Error;
use crate::firewall::Claim;
use crate::host::Host;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
#[derive(Default)]
struct Conf {
    backend: String,
    ingress_policy: String,
    iptables_admin_chain_name: String,
    firewalld_zone: String,
}

/// Runs the request. ADD returns the previous result.
pub(crate) fn run(host: &Host, request: &Request) -> Result<Option<Answer>, Error> {
    let conf: Conf = request.own()?;
    conf.check()?;
    match request.command {
        Command::Add => {
            let previous = request.chained()?;
            if host.firewall.foreign_drop()? {
                let reason = "the chain FORWARD of the table filter drops by default; accept the pods' packets there: \
                              this plugin changes only its own table";
                return Err(Error::invalid("backend", reason));
            }
            if let Some(claim) = conf.claim(request, &previous)? {
                host.firewall.put(&claim)?;
            }
            return Ok(Some(previous));
        }
        Command::Del => host.firewall.remove(&Claim::of(request))?,
        Command::Check => {
            let claim = conf.claim(request, &request.chained()?)?;
            if claim.is_some_and(|claim| !host.firewall.is_applied(&claim).unwrap_or(false)) {
                let (what, reason) = ("the isolation".to_owned(), "its rules are missing".to_owned());
                return Err(Error::Changed { what, reason });
            }
        }
        Command::Gc => host.firewall.keep_valid(request)?,
        Command::Status | Command::Version => {}
    }
    Ok(None)
}

/// The firewall claim of an existing attachment.
pub(crate) fn claim(request: &Request) -> Result<Option<Claim>, Error> {
    request.own::<Conf>()?.claim(request, &request.chained()?)
}

// === impl Conf ===

impl Conf {
    fn check(&self) -> Result<(), Error> {
        if !["", "iptables", "nftables"].contains(&self.backend.as_str()) {
            return Err(Error::invalid(
                "backend",
                format!("{:?} is neither iptables nor nftables", self.backend),
            ));
        }
        if !["", "open", "same-bridge"].contains(&self.ingress_policy.as_str()) {
            let reason = format!("{:?} is neither open nor same-bridge", self.ingress_policy);
            return Err(Error::invalid("ingressPolicy", reason));
        }
        let unsupported = [
            ("iptablesAdminChainName", &self.iptables_admin_chain_name),
            ("firewalldZone", &self.firewalld_zone),
        ];
        match unsupported.into_iter().find(|(_, value)| !value.is_empty()) {
            Some((field, value)) => Err(Error::unsupported(field, &value.as_str().into())),
            None => Ok(()),
        }
    }

    fn claim(&self, request: &Request, previous: &Answer) -> Result<Option<Claim>, Error> {
        if self.ingress_policy != "same-bridge" {
            return Ok(None);
        }
        let bridge = previous.routed_by().ok_or_else(|| {
            Error::invalid(
                "ingressPolicy",
                "same-bridge needs the plugin bridge before this plugin in the list",
            )
        })?;
        Ok(Some(Claim { isolated: Some(bridge.name.clone()), ..Claim::of(request) }))
    }
}
