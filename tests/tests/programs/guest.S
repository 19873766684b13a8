/* A machine of 96 MiB without an operating system: it fills 64 MiB of its memory, adds it up, writes
 * the sums to port 0xe9, and ends the emulator through port 0xf4. */
.code16
.globl _start
_start:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    inb $0x92, %al
    orb $2, %al
    outb %al, $0x92
    lgdt table
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmp $8, $wide
.code32
wide:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $4, %ebp
round:
    movl $0x100000, %edi
    movl $(64 << 20) / 64, %ecx
    movl %ebp, %eax
1:  imull $1664525, %eax, %eax
    addl $1013904223, %eax
    movl %eax, (%edi)
    addl $64, %edi
    decl %ecx
    jnz 1b
    movl $0x100000, %esi
    movl $(64 << 20) / 64, %ecx
    xorl %ebx, %ebx
2:  roll $1, %ebx
    addl (%esi), %ebx
    addl $64, %esi
    decl %ecx
    jnz 2b
    movl $8, %ecx
3:  roll $4, %ebx
    movb %bl, %al
    andb $15, %al
    addb $'0', %al
    cmpb $'9', %al
    jbe 4f
    addb $39, %al
4:  outb %al, $0xe9
    decl %ecx
    jnz 3b
    movb $10, %al
    outb %al, $0xe9
    decl %ebp
    jnz round
    xorb %al, %al
    outb %al, $0xf4
5:  hlt
    jmp 5b
.balign 8
descriptors:
    .quad 0
    .quad 0x00cf9a000000ffff
    .quad 0x00cf92000000ffff
table:
    .word table - descriptors - 1
    .long descriptors
.org 510
    .word 0xaa55
