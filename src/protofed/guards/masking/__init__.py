"""Secure sums: sites mask their numbers for each other, so that a server that relays everything learns the sum only.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical Secure Aggregation for
Privacy-Preserving Machine Learning. CCS 2017. One sum has four stages, each a message of every site to the server:

    advertise   two public keys, signed with the site's identity: one to encrypt, one to agree on masks
    share       the secrets from which a site's masks can be removed, in shares, one encrypted for each other site
    mask        the numbers plus a mask of the site's own plus one with each other site, which cancel in the sum
    unmask      of each site whose numbers came the share of its own mask's seed, of each other that of its mask key

`SiteParty` and `ServerParty` are the two sides without any network: bytes go in, bytes come out. Signatures, key
agreement, key derivation, encryption and the keystream are those of `cryptography`, Shamir's shares those of Flower.
"""

FEWEST = 3
"""Sites that agree on masks: of fewer, one is told by the other's sum."""


def threshold(sites: int) -> int:
    """How many of the sites that agreed on masks must stay to the end: two thirds.

    More than half, so that a server that tells some sites one list of survivors and the others another one never gets
    enough shares of both secrets of a site, even with 2 x threshold - sites - 1 sites on its side.
    """
    return -(-2 * sites // 3)
