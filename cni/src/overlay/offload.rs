//! Who sums packets up: the device, or the kernel before it.

#![expect(unsafe_code, reason = "a device's features are set by an ioctl with a pointer in it")]

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// `ETHTOOL_GTXCSUM`
const GET_CHECKSUMS: u32 = 0x16;
/// `ETHTOOL_STXCSUM`
const SET_CHECKSUMS: u32 = 0x17;

/// `struct ethtool_value`
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

nix::ioctl_readwrite_bad!(
    /// `SIOCETHTOOL`
    ethtool,
    0x8946,
    libc::ifreq
);

/// Has the device sum up what it sends, or not: `ethtool -K NAME tx on|off`.
pub(crate) fn set(name: &str, on: bool) -> io::Result<()> {
    ask(name, SET_CHECKSUMS, on.into()).map(drop)
}

/// Whether the device sums up what it sends.
pub(crate) fn get(name: &str) -> io::Result<bool> {
    ask(name, GET_CHECKSUMS, 0).map(|data| data != 0)
}

fn ask(name: &str, command: u32, data: u32) -> io::Result<u32> {
    let socket = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0"))?;
    let mut value = Value { command, data };
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: (&raw mut value).cast() },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    // SAFETY: request and value are whole and live until the call returns; the kernel uses them in it alone.
    unsafe { ethtool(socket.as_raw_fd(), &raw mut request) }?;
    Ok(value.data)
}
