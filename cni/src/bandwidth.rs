//! The `bandwidth` plugin. A token bucket on the host's end of the veth pair limits received packets. The host's end
//! redirects sent packets to an intermediate device, which has a token bucket, too.

use serde::Deserialize;

use crate::error::Error;
use crate::host::Host;
use crate::link::derived::host_interface;
use crate::link::traffic::Bucket;
use crate::link::{Link, Links, format_mac};
use crate::netns::Netns;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::{Answer, Interface};

/// Rates in bits per second, bursts in bits. 0 means no limit.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Conf {
    ingress_rate: u64,
    ingress_burst: u64,
    egress_rate: u64,
    egress_burst: u64,
}

/// The buckets to and from the sandbox.
struct Limits {
    ingress: Option<Bucket>,
    egress: Option<Bucket>,
}

/// Runs the request. ADD returns the previous result with the intermediate device.
pub(crate) async fn run(host: &Host, request: &Request) -> Result<Option<Answer>, Error> {
    let limits = Limits::of(request)?;
    let device = device(request);
    match request.command {
        Command::Add => {
            let previous = request.chained()?;
            if limits.ingress.is_none() && limits.egress.is_none() {
                return Ok(Some(previous));
            }
            add(host, request, &limits, previous).await.map(Some)
        }
        Command::Del => {
            host.links.delete(&device).await?;
            coracle_fault::point("bandwidth.removed");
            Ok(None)
        }
        Command::Check => {
            check(host, request, &limits).await?;
            Ok(None)
        }
        Command::Gc => host.links.sweep_ifbs().await.map(|()| None),
        Command::Status | Command::Version => Ok(None),
    }
}

/// Name of the intermediate device, derived from the attachment.
fn device(request: &Request) -> String {
    let name = host_interface(&request.container_id, &format!("{}/{}", request.network(), request.ifname));
    format!("bwp{}", &name[3..])
}

async fn add(host: &Host, request: &Request, limits: &Limits, mut previous: Answer) -> Result<Answer, Error> {
    let link = host_end(host, request, &previous).await?;
    if let Some(bucket) = limits.ingress {
        host.links.set_bucket(&link, bucket).await?;
        coracle_fault::point("bandwidth.limited");
    }
    if let Some(bucket) = limits.egress {
        let made = redirect_to_ifb(host, &link, &device(request), bucket).await;
        let device = match made {
            Ok(device) => device,
            Err(error) => {
                host.links.delete(&device(request)).await?;
                return Err(error);
            }
        };
        let mac = format_mac(&device.mac);
        previous.interfaces.push(Interface { name: device.name, mac, ..Interface::default() });
    }
    Ok(previous)
}

async fn redirect_to_ifb(host: &Host, link: &Link, device: &str, bucket: Bucket) -> Result<Link, Error> {
    let device = host.links.ensure_ifb(device, link).await?;
    coracle_fault::point("bandwidth.device-marked");
    host.links.set_bucket(&device, bucket).await?;
    coracle_fault::point("bandwidth.device-limited");
    host.links.redirect_to_ifb(link, &device).await?;
    coracle_fault::point("bandwidth.detoured");
    Ok(device)
}

async fn check(host: &Host, request: &Request, limits: &Limits) -> Result<(), Error> {
    let link = host_end(host, request, &request.chained()?).await?;
    let device = host.links.find(&device(request)).await?;
    for (link, bucket) in [(Some(link), limits.ingress), (device, limits.egress)] {
        let Some(bucket) = bucket else { continue };
        let changed =
            |reason: &str| Error::Changed { what: "the bandwidth".to_owned(), reason: reason.to_owned() };
        let link = link.ok_or_else(|| changed("the intermediate device is gone"))?;
        match host.links.bucket_rate(&link).await? {
            Some(rate) if rate == bucket.rate => {}
            Some(rate) => return Err(changed(&format!("{} bytes per second, not {}", rate, bucket.rate))),
            None => return Err(changed("it is not limited")),
        }
    }
    Ok(())
}

/// The host's end of the sandbox's veth pair.
async fn host_end(host: &Host, request: &Request, previous: &Answer) -> Result<Link, Error> {
    let inside = Links::inside(&Netns::open(request.netns()?)?)?;
    let peer = inside.get(&request.ifname).await?.peer;
    let missing = || Error::invalid("prevResult", format!("{} has no veth peer on the host", request.ifname));
    let link = match peer {
        Some(index) => host.links.find_index(index).await?,
        None => None,
    };
    let listed =
        |link: &Link| previous.interfaces.iter().any(|i| i.sandbox.is_empty() && i.name == link.name);
    link.filter(listed).ok_or_else(missing)
}

// === impl Limits ===

impl Limits {
    fn of(request: &Request) -> Result<Self, Error> {
        let mut conf: Conf = request.own()?;
        let is_own = [conf.ingress_rate, conf.ingress_burst, conf.egress_rate, conf.egress_burst] != [0; 4];
        if !is_own && let Some(given) = request.capability("bandwidth")? {
            conf = given;
        }
        Ok(Self {
            ingress: bucket("ingress", conf.ingress_rate, conf.ingress_burst)?,
            egress: bucket("egress", conf.egress_rate, conf.egress_burst)?,
        })
    }
}

fn bucket(way: &str, rate: u64, burst: u64) -> Result<Option<Bucket>, Error> {
    match (rate, burst) {
        (0, 0) => Ok(None),
        (0, _) => Err(Error::invalid(&format!("{way}Rate"), format!("is required with {way}Burst"))),
        (_, 0) => Err(Error::invalid(&format!("{way}Burst"), format!("is required with {way}Rate"))),
        (..8, _) | (_, ..8) => Err(Error::invalid(&format!("{way}Rate"), "is in bits, and less than a byte")),
        (rate, burst) => {
            let wrong = |_| Error::invalid(&format!("{way}Burst"), "is more than 4 GB");
            Ok(Some(Bucket { rate: rate / 8, burst: u32::try_from(burst / 8).map_err(wrong)? }))
        }
    }
}
